"""What a runner and the benchmark say to each other: one JSON object a line, questions on stdin, answers on stdout.

    {"do": "load", "settings": {...}}                                → {"versions": {...}, "precision": "...", ...}
    {"do": "run", "jobs": [{"prompt": [ids], "output": n, "at": s}]} → {"seconds": s, "tokens": [[ids]], "times": [[s]]}
    {"do": "end"}

Any answer may be {"error": "..."} instead. Times are seconds since the run began; "at" is when a request arrives.
Every answer has "rss", the most bytes that were resident so far. What an engine prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

_LONGEST_NAP = 0.02  # seconds
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl


class Stepper(Protocol):
    """An engine that is stepped by hand. Greedy, the end token ignored: a request ends after `output` tokens.

    step: the new tokens as (request, ids), as soon as they are known; it may wait for them.
    """

    @property
    def has_work(self) -> bool: ...

    def add(self, index: int, prompt: Sequence[int], output: int) -> None: ...

    def step(self) -> Sequence[tuple[int, Sequence[int]]]: ...


Loader = Callable[[dict[str, Any]], tuple[Stepper, dict[str, Any]]]
"""From settings to an engine that is ready and what to say of it: versions, precision, notes."""


def drive(stepper: Stepper, jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Send every job at its time and step until all is answered."""
    waiting = sorted(range(len(jobs)), key=lambda index: jobs[index].get("at", 0.0), reverse=True)
    tokens: list[list[int]] = [[] for _ in jobs]
    times: list[list[float]] = [[] for _ in jobs]
    began = time.perf_counter()
    while waiting or stepper.has_work:
        now = time.perf_counter() - began
        while waiting and jobs[waiting[-1]].get("at", 0.0) <= now:
            index = waiting.pop()
            stepper.add(index, jobs[index]["prompt"], jobs[index]["output"])
        if not stepper.has_work:
            time.sleep(min(max(jobs[waiting[-1]].get("at", 0.0) - now, 0.0), _LONGEST_NAP))
            continue
        gained = stepper.step()
        now = time.perf_counter() - began
        for index, ids in gained:
            tokens[index].extend(map(int, ids))
            times[index].extend([round(now, 6)] * len(ids))
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "times": times}


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each package."""
    return {name: importlib.metadata.version(name) for name in packages}


def peak_rss() -> int:
    """Most bytes of this process that were resident at once."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def serve(load: Loader) -> None:
    """Answer questions until "end" or the end of stdin."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what engines print must not come between the answers
    stepper: Stepper | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "end":
            break
        try:
            if message["do"] == "load":
                settings = message["settings"]
                use_cores(settings["threads"])
                began = time.perf_counter()
                stepper, answer = load(settings)
                answer["load_seconds"] = time.perf_counter() - began
            else:
                assert stepper is not None, "asked to run before anything was loaded"
                answer = drive(stepper, message["jobs"])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answers, answer | {"rss": peak_rss()})
    os._exit(0)  # some engines hang or crash while they are taken down


def use_cores(count: int) -> None:
    """Keep this process, and the threads it will start, on its first `count` cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with_parent() -> None:
    """A runner that is stopped (SIGSTOP) would outlive a benchmark that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
