"""Workloads of the simulator on the engine itself: the same jobs, on this machine's device, recorded."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jcb.config import SchedulerConfig, ServeConfig
from jcb.engine.core import EngineCore
from jcb.recording import Recording
from jcb.recording.recorder import RecordingFile
from jcb.scheduler.scheduler import Scheduler
from jcb.simulate.job import Job
from jcb.simulate.recorded import RecordedWorkload, recorded_stats
from jcb.simulate.simulation import Workload
from jcb.simulate.stats import RunStats
from jcb.simulate.what_if import PATIENT, config_of
from jcb.types import Request, SamplingParams, SequenceOutput

if TYPE_CHECKING:
    from jcb.engine.build import Engine

_LONGEST_NAP = 0.05  # seconds


def load(config: ServeConfig) -> Engine:
    """An engine without a recorder of its own; every run brings one."""
    from jcb.engine.build import load_engine

    print("loading and compiling ...", file=sys.stderr, flush=True)
    return load_engine(config)


def run(engine: Engine, workload: Workload, path: Path, scheduler: SchedulerConfig | None = None) -> Recording:
    """Runs every job to its end, at its time, and records that at `path`.

    scheduler: knobs below those that the engine was compiled for. The cache of prefixes begins empty. Answers have
    the lengths that the jobs say; their tokens are the model's own, so a later turn shares only its prompts.
    """
    from jcb.engine.record import start_recorder

    info, limits = engine.info, engine.info.limits
    assert limits is not None
    knobs = dataclasses.replace(scheduler or engine.config.scheduler, **PATIENT)
    caching = engine.config.cache.enable_prefix_caching
    config = dataclasses.replace(engine.config, scheduler=knobs)
    shapes = engine.executor.registry.shapes
    recorder = start_recorder(RecordingFile(path), config, engine.model, engine.platform, shapes)
    core = EngineCore(
        Scheduler(knobs, limits, enable_prefix_caching=caching),
        engine.executor,
        overlap=engine.config.engine.overlap,
        recorder=recorder,
    )
    try:
        Runner(core, workload, info.vocab_size, limits.max_model_len).run()
    finally:
        recorder.close()
    return Recording.open(path)


class Runner:
    """Sends jobs to an engine when they are due and steps it in between, until all have ended."""

    def __init__(self, core: EngineCore, workload: Workload, vocab_size: int, max_model_len: int) -> None:
        self._core = core
        self._workload = workload
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._order = itertools.count()
        self._due: list[tuple[float, int, Job]] = []
        self._live: dict[str, Job] = {}
        self._lengths: dict[str, int] = {}

    def run(self) -> None:
        arrivals = iter(self._workload.jobs())
        upcoming = next(arrivals, None)
        begin = time.monotonic()
        while upcoming is not None or self._due or self._core.has_work:
            now = time.monotonic() - begin
            while upcoming is not None and upcoming.at <= now:
                self._add(upcoming, begin)
                upcoming = next(arrivals, None)
            while self._due and self._due[0][0] <= now:
                self._add(heapq.heappop(self._due)[2], begin)
            if self._core.has_work:
                self._take(self._core.step(), begin)
            else:
                when = min(upcoming.at if upcoming else math.inf, self._due[0][0] if self._due else math.inf)
                time.sleep(min(max(when - now, 0.0), _LONGEST_NAP))

    def _add(self, job: Job, begin: float) -> None:
        """The job's prompt in the model's vocabulary."""
        size = self._vocab_size - 1
        output = min(job.output_tokens, self._max_model_len - len(job.prompt))
        if output < 1:
            raise ValueError(f"a prompt of {len(job.prompt)} tokens does not fit max_model_len={self._max_model_len}")
        name = str(job.number)
        self._core.add(
            Request(
                request_id=name,
                prompt_token_ids=tuple([token % size for token in job.prompt]),
                params=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
                arrival_time=begin + job.at,
                priority=job.priority,
                namespace=job.namespace,
                max_tokens=output,
            )
        )
        self._live[name] = job
        self._lengths[name] = 0

    def _take(self, outputs: list[SequenceOutput], begin: float) -> None:
        for output in outputs:
            name = output.request_id
            self._lengths[name] += len(output.token_ids)
            job = self._live[name]
            ended = output.finish_reason is not None
            if not ended and job.abort_after is not None and self._lengths[name] >= job.abort_after:
                self._core.abort(name)
                ended = True
            if ended:
                del self._live[name], self._lengths[name]
                following = self._workload.after(job, time.monotonic() - begin)
                if following is not None:
                    heapq.heappush(self._due, (following.at, next(self._order), following))


def rerun(recording: Recording, settings: Mapping[str, object], *, model: str = "") -> RunStats:
    """A recorded run again, on this machine, under `settings`."""
    config = config_of(recording, settings)
    config = dataclasses.replace(config, model=model or recording.header.model)
    engine = load(config)
    with tempfile.TemporaryDirectory() as folder:
        return recorded_stats(run(engine, RecordedWorkload(recording), Path(folder) / "rerun.jsonl"))
