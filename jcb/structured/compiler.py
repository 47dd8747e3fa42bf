"""Compiles grammars for a server: tried out in a process that can be killed, then compiled here, and kept.

Neither the event loop nor the engine's thread does any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from jcb.structured.check import check, refusal
from jcb.structured.grammar import CompiledGrammar, GrammarError, plain, translate, try_out
from jcb.structured.vocab import Vocab, make_tokenizer
from jcb.types import Grammar, RequestError, Structured

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 2
"""For one grammar in the worker. It is then compiled once more here, in about the same time."""

MEMORY_BYTES = 512 << 20
CACHE_BYTES = 64 << 20
MAX_QUEUED = 64
"""Grammars that may wait for being compiled."""

RETRY_SECONDS = 1.0
_KILLED = -9  # by SIGKILL, which the memory limit does not send
_THREADS = 2  # so that one hostile grammar leaves a worker to the others
_START_SECONDS = 60.0
_LEAST_COST, _COST_OF_A_CHARACTER = 64 << 10, 64  # bytes, roughly what llguidance keeps


class GrammarCompiler:
    """`Structured` in, `Grammar` out; equal ones are compiled once. Threads and processes start when first needed.

    vocab: None refuses all (the model's tokenizer is of an unknown kind).
    """

    def __init__(self, vocab: Vocab | None, *, seconds: int = TRIAL_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._vocab = vocab
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._known: OrderedDict[Structured, Grammar | RequestError] = OrderedDict()  # the oldest first
        self._cost = 0
        self._pending: dict[Structured, Future[Grammar]] = {}
        self._closed = False

    def submit(self, structured: Structured) -> Future[Grammar]:
        """Begins to compile; the future holds the grammar or a RequestError. Raises one at once if it is refused."""
        if self._vocab is None:
            raise refusal(structured, "is not possible with this model's tokenizer", code="unsupported_field")
        with self._lock:
            known = self._known.get(structured)
            if known is not None:
                self._known.move_to_end(structured)
                return _done(known)
            if self._closed:
                raise _unavailable(structured, "the server is shutting down", retry_after=5.0)
            pending = self._pending.get(structured)
            if pending is not None and not pending.done():
                return pending
            if len(self._pending) >= MAX_QUEUED:
                raise refusal(structured, "must wait: too many are being compiled", code="queue_full", status=429)
            check(structured)
            future = self._pending[structured] = self._pool.submit(self._compile, structured, self._vocab)
        future.add_done_callback(lambda done: self._keep(structured, done))
        return future

    async def compile(self, structured: Structured) -> Grammar:
        """The grammar, waited for in an event loop; a caller that leaves does not stop it for others."""
        future = self.submit(structured)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            raise _unavailable(structured, "the server is shutting down", retry_after=5.0) from None

    def compile_here(self, structured: Structured) -> Grammar:
        """The grammar, compiled now in the caller's thread, without limits: for a caller that is trusted."""
        if self._vocab is None:
            raise refusal(structured, "is not possible with this model's tokenizer", code="unsupported_field")
        check(structured)
        tokenizer = self._tokenizer
        try:
            return CompiledGrammar(tokenizer, self._vocab, translate(structured), structured.param)
        except (GrammarError, ValueError) as error:
            raise refusal(structured, f"cannot be used: {plain(str(error))}", code="invalid_grammar") from None

    def close(self) -> None:
        """Ends the threads and processes."""
        with self._lock:
            self._closed = True
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, structured: Structured, vocab: Vocab) -> Grammar:
        """Raises nothing but RequestError: what goes wrong with the machine is a 503, and not remembered."""
        try:
            return self._try_and_compile(structured, vocab)
        except RequestError:
            raise
        except Exception as error:  # its words may quote the grammar
            logger.error("a grammar was not compiled: %s", type(error).__name__)
            raise _unavailable(structured, "its compiler failed") from None

    def _try_and_compile(self, structured: Structured, vocab: Vocab) -> Grammar:
        tokenizer = self._tokenizer
        worker = self._take_worker(vocab)
        try:
            grammar = worker.try_out(structured)
        finally:
            self._give_back(worker)
        try:
            compiled = CompiledGrammar(tokenizer, vocab, grammar, structured.param)
            try_out(compiled)
        except (GrammarError, ValueError) as error:
            raise refusal(structured, f"cannot be used: {plain(str(error))}", code="invalid_grammar") from None
        return compiled

    @cached_property
    def _tokenizer(self) -> Any:
        assert self._vocab is not None
        return make_tokenizer(self._vocab)

    def _take_worker(self, vocab: Vocab) -> _Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is not None:
            if worker.is_fit:
                return worker
            worker.close()
        return _Worker(vocab, self._seconds, self._memory_bytes)

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            keep = worker.is_fit and not self._closed
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.close()

    def _keep(self, structured: Structured, done: Future[Grammar]) -> None:
        """Remember how it ended, refusals too, and forget what was not asked for longest."""
        with self._lock:
            if self._pending.get(structured) is done:
                del self._pending[structured]
            error = None if done.cancelled() else done.exception()
            if done.cancelled() or not isinstance(error, RequestError | None) or (error and error.status >= 500):
                return
            self._known[structured] = error or done.result()
            self._cost += _cost(structured)
            while self._cost > CACHE_BYTES and len(self._known) > 1:
                oldest, _ = self._known.popitem(last=False)
                self._cost -= _cost(oldest)


class _Worker:
    """One `jcb.structured.worker` process."""

    def __init__(self, vocab: Vocab, seconds: int, memory_bytes: int) -> None:
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._is_worn = False
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jcb.structured.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # a Ctrl-C in the terminal is for the server
        )
        head = {
            "pieces": [piece.decode("latin-1") for piece in vocab.pieces],
            "special_ids": list(vocab.special_ids),
            "end_ids": list(vocab.end_ids),
            "seconds": seconds,
            "memory_bytes": memory_bytes,
        }
        answer, _ = self._ask(head, _START_SECONDS)
        if answer is None:
            self.close()
            raise RequestError(
                "structured output is not available: its worker does not start",
                code="grammar_unavailable",
                status=503,
                retry_after=RETRY_SECONDS,
            )

    @property
    def is_fit(self) -> bool:
        """Whether it can be asked again."""
        return not self._is_worn and self._process.poll() is None

    def try_out(self, structured: Structured) -> str:
        """The translated grammar, or the RequestError that refuses it. The worker may be dead afterwards."""
        before = _cpu_seconds(self._process.pid)
        answer, timed_out = self._ask(dataclasses.asdict(structured), self._seconds)
        if answer is None:
            self._is_worn = True
            busy = self._busy_until_end(before)
            if timed_out and busy is not None and busy < self._seconds / 4:
                raise _unavailable(structured, "this machine is too busy to compile it")
            if not timed_out and self._process.wait() == _KILLED:
                raise _unavailable(structured, "its compiler was killed")
            spent = f"{self._seconds} s" if timed_out else f"{self._memory_bytes >> 20} MiB of memory"
            raise refusal(structured, f"takes more than {spent} to compile", code="grammar_too_complex")
        self._is_worn = answer["is_worn"]
        if "error" in answer:
            raise refusal(structured, f"cannot be used: {answer['error']}", code="invalid_grammar")
        return answer["grammar"]

    def _busy_until_end(self, before: float | None) -> float | None:
        """Seconds of a processor that the process, which has ended, took since it had taken `before`."""
        after = None if self._process.returncode is not None else _cpu_seconds(self._process.pid)
        return None if before is None or after is None else after - before

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written cannot be
                pipe.close()
        self._process.wait()

    def _ask(self, message: dict[str, Any], seconds: float) -> tuple[dict[str, Any] | None, bool]:
        """One line each way; (None, whether time ran out) when the process ended instead."""
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self._process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        return (json.loads(line) if line.endswith("\n") else None), timed_out.is_set()


def _unavailable(structured: Structured, why: str, *, retry_after: float = RETRY_SECONDS) -> RequestError:
    """The 503 for a grammar that may well be fine."""
    message = f"{structured.param} cannot be compiled now: {why}; try again"
    return RequestError(
        message, param=structured.param, code="grammar_unavailable", status=503, retry_after=retry_after
    )


def _cpu_seconds(pid: int) -> float | None:
    """What a process of ours that is not yet waited for has taken of a processor; None where nothing tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _done(known: Grammar | RequestError) -> Future[Grammar]:
    future: Future[Grammar] = Future()
    if isinstance(known, RequestError):
        future.set_exception(copy.copy(known))  # each raised one gathers a traceback
    else:
        future.set_result(known)
    return future


def _cost(structured: Structured) -> int:
    return _LEAST_COST + _COST_OF_A_CHARACTER * len(structured.source)
