"""The engine's thread: commands in, steps, outputs out.

The step loop never waits for a reader. Commands (add, abort) go through one inbox in order; what a step
produced goes to the event loop with one wake-up. With nothing to do the thread sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jcb.config import SchedulerConfig
from jcb.engine.core import EngineCore
from jcb.engine.feed import StepFeed
from jcb.engine.output import OutputProcessor, RequestOutput
from jcb.engine.stream import OutputStream
from jcb.metrics import EngineMetrics
from jcb.types import FinishReason, Request, RequestError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long the engine has nothing to do before it checks its books."""

Outputs = list[tuple[OutputStream, RequestOutput]]


@dataclass(slots=True)
class Add:
    """Admit these, all or none; `admitted` is told which."""

    requests: list[Request]
    stream: OutputStream
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class Abort:
    """End these now; None: all."""

    request_ids: list[str] | None
    error: RequestError | None = None


@dataclass(slots=True)
class Turn:
    """Change knobs of the scheduler; `turned` gets its configuration from then on."""

    changes: Mapping[str, Any]
    turned: asyncio.Future[SchedulerConfig]


Command = Add | Abort | Turn


class EngineLoop:
    """Runs an EngineCore in a thread of its own.

    deliver: called in the event loop with what the streams there are to get. Every other method but `send`, `stop`
    and the properties belongs to the thread.
    """

    def __init__(
        self,
        core: EngineCore,
        processor: OutputProcessor,
        metrics: EngineMetrics,
        feed: StepFeed,
        deliver: Callable[[Outputs], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._processor = processor
        self._metrics = metrics
        self._feed = feed
        self._deliver = deliver
        self._clock = clock
        self._inbox: list[Command] = []
        self._wake = threading.Condition()
        self._streams: dict[str, OutputStream] = {}  # by request id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._busy = False
        self._taken: list[Command] = []  # out of the inbox and not carried out yet
        self._is_checked = True  # since the last request
        self.num_in_inbox = 0  # requests, not commands
        self.tokens_in_inbox = 0  # of their prompts
        self.last_progress = 0.0
        self.error: BaseException | None = None

    # -- any thread's side

    def start(self) -> None:
        """Starts the thread; outputs go to the running event loop."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._loop = asyncio.get_running_loop()
        self.last_progress = self._clock()
        self._thread = threading.Thread(target=self._run, name="jcb-engine", daemon=True)
        self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    @property
    def is_idle(self) -> bool:
        return not self._busy and not self._inbox

    def send(self, command: Command) -> None:
        """Puts a command into the inbox; RequestError 503 for one with an answer when the thread has died."""
        with self._wake:
            if self.error is not None and not isinstance(command, Abort):
                raise engine_lost()
            if self.is_idle:
                self.last_progress = self._clock()
            self._inbox.append(command)
            if isinstance(command, Add):
                self.num_in_inbox += len(command.requests)
                self.tokens_in_inbox += sum(len(request.prompt_token_ids) for request in command.requests)
            self._wake.notify()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the step it is in; False when that step did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the thread's side

    def _run(self) -> None:
        try:
            while (commands := self._take_commands()) is not None:
                self._taken = commands.copy()
                while self._taken:
                    self._apply(self._taken[0])
                    del self._taken[0]
                if commands:
                    self._metrics.record_stats(self._core.scheduler.stats())
                if self._core.has_work:
                    self._step()
                elif not commands:
                    self._core.scheduler.check_integrity()
                    self._is_checked = True
                self._busy = self._core.has_work
                stats = self._core.scheduler.stats()
                self._metrics.record_stats(stats)
                if not self._busy:
                    self._feed.record_rest(stats)
        except BaseException as error:  # the thread's last act: nobody may hang
            self._die(error)

    def _take_commands(self) -> list[Command] | None:
        with self._wake:
            while not self._inbox and not self._core.has_work and not self._stopping:
                if not self._wake.wait(None if self._is_checked else IDLE_SECONDS):
                    break  # idle for a while: time to look whether anything was lost
            if self._stopping:
                return None
            commands, self._inbox = self._inbox, []
            self.num_in_inbox = self.tokens_in_inbox = 0
            self._busy = bool(commands) or self._core.has_work
            if self._busy:
                self._is_checked = False
            return commands

    def _apply(self, command: Command) -> None:
        if isinstance(command, Add):
            self._admit(command)
        elif isinstance(command, Turn):
            self._turn(command)
        else:
            self._end(command)

    def _turn(self, command: Turn) -> None:
        try:
            config = self._core.turn(command.changes)
        except RequestError as error:
            self._call(_settle, command.turned, error)
        else:
            self._call(_settle, command.turned, None, config)

    def _end(self, command: Abort) -> None:
        ids = list(self._streams) if command.request_ids is None else command.request_ids
        ended: Outputs = []
        for request_id in ids:
            stream = self._streams.pop(request_id, None)
            if stream is None:
                continue
            self._core.abort(request_id, FinishReason.ABORT)
            self._processor.remove(request_id)
            self._metrics.request_success.inc(label=FinishReason.ABORT.value)
            end = RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT, error=command.error)
            ended.append((stream, end))
        self._post(ended)

    def _admit(self, command: Add) -> None:
        added: list[str] = []
        try:
            for index, request in enumerate(command.requests):
                self._core.add(request)
                added.append(request.request_id)
                self._processor.add(request, index)
                self._streams[request.request_id] = command.stream
        except RequestError as error:
            for request_id in added:
                self._core.abort(request_id, FinishReason.ABORT)
                self._processor.remove(request_id)
                del self._streams[request_id]
            self._call(_settle, command.admitted, error)
        else:
            self._call(_settle, command.admitted, None)

    def _step(self) -> None:
        steps_before = self._metrics.steps.value
        outputs = self._core.step()
        results, stopped = self._processor.process(outputs)
        for request_id in stopped:
            self._core.abort(request_id, FinishReason.STOP)
        deliveries: Outputs = []
        for result in results:
            stream = self._streams.get(result.request_id)
            if stream is None:
                continue
            deliveries.append((stream, result))
            if result.finish_reason is not None:
                del self._streams[result.request_id]
        self._post(deliveries)
        if self._metrics.steps.value > steps_before:
            self.last_progress = self._clock()

    def _post(self, outputs: Outputs) -> None:
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
            self.error = error
            commands, self._inbox = self._taken + self._inbox, []
        lost = engine_lost()
        for command in commands:
            if not isinstance(command, Abort):
                future = command.admitted if isinstance(command, Add) else command.turned
                self._call(_settle, future, lost)
        self._post(
            [
                (stream, RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=lost))
                for request_id, stream in self._streams.items()
            ]
        )
        self._streams.clear()


def _settle(future: asyncio.Future[Any], error: RequestError | None, result: Any = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def engine_lost() -> RequestError:
    """What every request hears once the thread has died."""
    return RequestError("the engine has failed; restart the server", status=503, code="engine_lost", retry_after=5.0)
