"""The engine behind an event loop: one thread runs the steps, coroutines submit and read.

The step loop never waits for a reader. Commands (add, abort) go through one inbox in order; what a step
produced comes back with one wake-up of the event loop. With nothing to do the thread sleeps.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from jcb.config import SchedulerConfig
from jcb.engine.admission import ModelInfo, make_requests
from jcb.engine.core import EngineCore
from jcb.engine.output import OutputProcessor, RequestOutput
from jcb.engine.stream import OutputStream
from jcb.metrics import EngineMetrics
from jcb.scheduler.policy import check_can_ever_queue, check_priority, check_queue
from jcb.text.tokenizer import Tokenizer
from jcb.types import FinishReason, Request, RequestError, SamplingParams

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long the engine has nothing to do before it checks its books."""


class EngineState(enum.StrEnum):
    """What the engine is doing, as /ready tells it."""

    LOADING = "loading"
    COMPILING = "compiling"
    IDLE = "idle"
    STEPPING = "stepping"
    STALLED = "stalled"  # something waiting, nothing moving
    DEAD = "dead"


@dataclass(slots=True)
class _Add:
    requests: list[Request]
    stream: OutputStream
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class _Abort:
    request_ids: list[str] | None  # None: all
    error: RequestError | None = None


class AsyncEngine:
    """Runs an EngineCore in its own thread for the event loop that called `start`.

    scheduler: its queue limit refuses a submission at once, where the scheduler itself could only between two
    steps. watchdog_seconds: how long work may stand still.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        info: ModelInfo,
        *,
        metrics: EngineMetrics | None = None,
        seed: int | None = None,
        scheduler: SchedulerConfig | None = None,
        watchdog_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.info = info
        self.metrics = metrics or EngineMetrics()
        core.metrics = self.metrics
        self._processor = OutputProcessor(tokenizer, metrics=self.metrics, clock=clock)
        self._rng: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        self._scheduler_config = scheduler
        self._watchdog_seconds = watchdog_seconds
        self._clock = clock
        self._inbox: list[_Add | _Abort] = []
        self._wake = threading.Condition()
        self._streams: dict[str, OutputStream] = {}  # by request id; the engine's thread only
        self._open: set[OutputStream] = set()  # the event loop's thread only
        self._num_in_inbox = 0  # requests, not commands
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._draining = False
        self._busy = False
        self._taken: list[_Add | _Abort] = []  # out of the inbox and not carried out yet
        self._is_checked = True  # since the last request
        self._last_progress = 0.0
        self._last_awake = 0.0  # when the process came to after it was stopped
        self._error: BaseException | None = None

    # -- the event loop's side ---------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; call it in the event loop that will read the outputs."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._loop = asyncio.get_running_loop()
        self._last_progress = self._clock()
        self._thread = threading.Thread(target=self._run, name="jcb-engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """Computed from a few plain values; safe from any thread and cheap enough for every probe."""
        if self._error is not None:
            return EngineState.DEAD
        if self._thread is None:
            return EngineState.LOADING
        if not self._busy and not self._inbox:
            return EngineState.IDLE
        still = self._clock() - max(self._last_progress, self._last_awake)
        return EngineState.STALLED if still > self._watchdog_seconds else EngineState.STEPPING

    @property
    def is_healthy(self) -> bool:
        return self.state in (EngineState.IDLE, EngineState.STEPPING)

    async def until_broken(self, interval: float = 1.0) -> EngineState:
        """Returns when the engine is stalled or dead, and why it can only be restarted."""
        while True:
            asleep = self._clock()
            await asyncio.sleep(interval)
            if self._clock() - asleep > 2 * interval:
                self._last_awake = self._clock()  # the whole process stood still: not the engine's fault
            if self.state in (EngineState.STALLED, EngineState.DEAD):
                return self.state

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def num_open(self) -> int:
        """Submissions that have not been read to their end or left."""
        return len(self._open)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        namespace: str = "",
    ) -> OutputStream:
        """Admits `params.n` choices of each prompt, all or none; choice k of prompt i has index i * n + k.

        RequestError when any of them cannot be served. Read the stream inside `async with`.
        """
        self._check_open()
        requests: list[Request] = []
        for prompt in prompts:
            requests += make_requests(
                prompt,
                params,
                model=self.info,
                request_id=uuid.uuid4().hex,
                rng=self._rng,
                priority=priority,
                namespace=namespace,
                arrival_time=self._clock(),
            )
        self._check_queue(requests)
        assert self._loop is not None
        stream = OutputStream([request.request_id for request in requests], self._abort)
        admitted: asyncio.Future[None] = self._loop.create_future()
        self._open.add(stream)
        try:
            self._send(_Add(requests, stream, admitted))
            await admitted
        except BaseException as error:
            stream.close()
            self._open.discard(stream)
            if isinstance(error, RequestError) and error.status in (429, 503):
                self.metrics.admission_rejections.inc()
            raise
        return stream

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        namespace: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one prompt's choices as they come; closing the iterator aborts them."""
        stream = await self.submit([prompt_token_ids], params, priority=priority, namespace=namespace)
        async with stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits for the running ones, then ends the rest with an error."""
        self._draining = True
        deadline = self._clock() + seconds
        while any(not stream.finished for stream in self._open) and self._clock() < deadline:
            await asyncio.sleep(0.02)
        error = RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=5.0)
        self._send(_Abort(None, error))
        patience = self._clock() + 2.0
        while any(not stream.finished for stream in self._open) and self._clock() < patience:
            await asyncio.sleep(0.01)

    def stop(self, timeout: float = 5.0) -> bool:
        """Ends the thread after the step it is in; False when that step did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _check_open(self) -> None:
        if self._error is not None:
            raise _engine_lost()
        if self._draining or self._stopping or self._thread is None:
            word = "shutting down" if self._thread is not None else "starting"
            raise RequestError(f"the server is {word}", status=503, code="unavailable", retry_after=5.0)

    def _check_queue(self, requests: list[Request]) -> None:
        if self._scheduler_config is None or self.info.limits is None or not requests:
            return
        check_priority(self._scheduler_config, requests[0].priority)
        check_can_ever_queue(self._scheduler_config, self.info.limits, requests)
        waiting = int(self.metrics.num_requests_waiting.value) + self._num_in_inbox + len(requests) - 1
        try:
            check_queue(self._scheduler_config, self.info.limits, requests[-1], waiting, 0)
        except RequestError:
            self.metrics.admission_rejections.inc()
            raise

    def _abort(self, request_ids: list[str]) -> None:
        self._send(_Abort(request_ids))

    def _send(self, command: _Add | _Abort) -> None:
        with self._wake:
            if self._error is not None and isinstance(command, _Add):
                raise _engine_lost()
            if not self._busy and not self._inbox:
                self._last_progress = self._clock()
            self._inbox.append(command)
            if isinstance(command, _Add):
                self._num_in_inbox += len(command.requests)
            self._wake.notify()

    def _deliver(self, outputs: list[tuple[OutputStream, RequestOutput]]) -> None:
        for stream, output in outputs:
            stream.put(output)
            if stream.finished:
                self._open.discard(stream)

    # -- the engine's side -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (commands := self._take_commands()) is not None:
                self._taken = commands.copy()
                while self._taken:
                    self._apply(self._taken[0])
                    del self._taken[0]
                if commands:
                    self.metrics.record_stats(self.core.scheduler.stats())
                if self.core.has_work:
                    self._step()
                elif not commands:
                    self.core.scheduler.check_integrity()
                    self._is_checked = True
                self._busy = self.core.has_work
                self.metrics.record_stats(self.core.scheduler.stats())
        except BaseException as error:  # the thread's last act: nobody may hang
            self._die(error)

    def _take_commands(self) -> list[_Add | _Abort] | None:
        with self._wake:
            while not self._inbox and not self.core.has_work and not self._stopping:
                if not self._wake.wait(None if self._is_checked else IDLE_SECONDS):
                    break  # idle for a while: time to look whether anything was lost
            if self._stopping:
                return None
            commands, self._inbox = self._inbox, []
            self._num_in_inbox = 0
            self._busy = bool(commands) or self.core.has_work
            if self._busy:
                self._is_checked = False
            return commands

    def _apply(self, command: _Add | _Abort) -> None:
        if isinstance(command, _Add):
            self._admit(command)
            return
        ids = list(self._streams) if command.request_ids is None else command.request_ids
        ended: list[tuple[OutputStream, RequestOutput]] = []
        for request_id in ids:
            stream = self._streams.pop(request_id, None)
            if stream is None:
                continue
            self.core.abort(request_id, FinishReason.ABORT)
            self._processor.remove(request_id)
            self.metrics.request_success.inc(label=FinishReason.ABORT.value)
            end = RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT, error=command.error)
            ended.append((stream, end))
        self._post(ended)

    def _admit(self, command: _Add) -> None:
        added: list[str] = []
        try:
            for index, request in enumerate(command.requests):
                self.core.add(request)
                added.append(request.request_id)
                self._processor.add(request, index)
                self._streams[request.request_id] = command.stream
        except RequestError as error:
            for request_id in added:
                self.core.abort(request_id, FinishReason.ABORT)
                self._processor.remove(request_id)
                del self._streams[request_id]
            self._call(_settle, command.admitted, error)
        else:
            self._call(_settle, command.admitted, None)

    def _step(self) -> None:
        steps_before = self.metrics.steps.value
        outputs = self.core.step()
        results, stopped = self._processor.process(outputs)
        for request_id in stopped:
            self.core.abort(request_id, FinishReason.STOP)
        deliveries: list[tuple[OutputStream, RequestOutput]] = []
        for result in results:
            stream = self._streams.get(result.request_id)
            if stream is None:
                continue
            deliveries.append((stream, result))
            if result.finish_reason is not None:
                del self._streams[result.request_id]
        self._post(deliveries)
        if self.metrics.steps.value > steps_before:
            self._last_progress = self._clock()

    def _post(self, outputs: list[tuple[OutputStream, RequestOutput]]) -> None:
        if outputs:
            self._call(self._deliver, outputs)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: no reader is left
            logger.debug("the event loop is closed; outputs dropped")

    def _die(self, error: BaseException) -> None:
        """Ends every request with an error; the message of `error` stays out of the log (it may quote a prompt)."""
        trace = "".join(traceback.format_tb(error.__traceback__))
        logger.error("the engine loop ended with %s\n%s", type(error).__name__, trace)
        with self._wake:
            self._error = error
            commands, self._inbox = self._taken + self._inbox, []
        lost = _engine_lost()
        for command in commands:
            if isinstance(command, _Add):
                self._call(_settle, command.admitted, lost)
        self._post(
            [
                (stream, RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=lost))
                for request_id, stream in self._streams.items()
            ]
        )
        self._streams.clear()


def _settle(future: asyncio.Future[None], error: RequestError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _engine_lost() -> RequestError:
    return RequestError("the engine has failed; restart the server", status=503, code="engine_lost", retry_after=5.0)
