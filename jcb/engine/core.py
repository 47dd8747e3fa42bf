"""The loop of the engine: plan a step, start it, take in the results of the one before."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jcb.config import SchedulerConfig
from jcb.metrics import StepTimes
from jcb.scheduler.scheduler import Scheduler
from jcb.types import FinishReason, Request, SequenceOutput, StepPlan, StepResult

logger = logging.getLogger("jcb.engine")


class Executor(Protocol):
    """Runs plans on a device, in the order of dispatch.

    dispatch starts a plan and returns a handle without waiting; it keeps no reference to the plan's arrays that
    later changes could reach. collect waits for a handle's result; handles are collected in order.
    reset forgets the cache and all handles after either of them raised.
    """

    def dispatch(self, plan: StepPlan) -> Any: ...

    def collect(self, handle: Any) -> StepResult: ...

    def reset(self) -> None: ...


class Metrics(Protocol):
    """Hears of every step."""

    def record_step(
        self, plan: StepPlan, outputs: list[SequenceOutput], stats: dict[str, int], times: StepTimes
    ) -> object: ...


class Recorder(Protocol):
    """Takes notes of everything, in the engine's order; `jcb.recording.Recorder` is one. Its methods never raise."""

    def arrived(self, request: Request, now: float) -> object: ...

    def aborted(self, output: SequenceOutput, now: float) -> object: ...

    def knobs_turned(self, changes: Mapping[str, Any], now: float) -> object: ...

    def collected(self, step_id: int, seconds: float) -> object: ...

    def failed(self, step_id: int, where: str, void: list[int]) -> object: ...

    def turned(
        self,
        plan: StepPlan,
        outputs: list[SequenceOutput],
        *,
        t: float,
        end: float,
        host: float,
        before: float,
        dispatch: float,
    ) -> object: ...

    def close(self) -> object: ...


class EngineCore:
    """Scheduler and executor joined; one thread only.

    overlap: the host plans step n + 1 while the device runs step n. Every request added ends exactly once:
    in an output of `step`, or in the output that `abort` returns. recorder: notes all that happens here, in order.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._overlap = overlap
        self._clock = clock
        self.metrics = metrics
        self.recorder = recorder
        self._in_flight: deque[tuple[StepPlan, Any, float]] = deque()  # with the time of dispatch
        self._last_collected = 0.0
        self._dispatch_span = (0.0, 0.0)  # of the last turn that dispatched: begin and end
        self._waited = 0.0  # for the device, in this turn
        self._device: float | None = None  # how long the step taken in this turn took

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_work or bool(self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request; RequestError when it is refused."""
        now = self._clock()
        self.scheduler.add(request, now)
        if self.recorder is not None:
            self.recorder.arrived(request, now)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> SequenceOutput | None:
        """End a request between steps; None when it is unknown or has ended."""
        output = self.scheduler.abort(request_id, reason)
        if output is not None and self.recorder is not None:
            self.recorder.aborted(output, self._clock())
        return output

    def turn(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        """Change knobs of the scheduler between steps, see `Scheduler.turn`."""
        config = self.scheduler.turn(changes)
        if self.recorder is not None:
            self.recorder.knobs_turned(changes, self._clock())
        return config

    def step(self) -> list[SequenceOutput]:
        """One turn of the loop; the outputs are mostly those of the step dispatched a turn before."""
        now = self._clock()
        self._waited, self._device = 0.0, None
        outputs = self.scheduler.expire(now)
        plan = self.scheduler.schedule(now)
        outputs += self._dispatch(plan)
        ahead = 1 if self._overlap and plan.rows else 0
        while len(self._in_flight) > ahead:
            outputs += self._collect()
        self._tell(plan, outputs, now)
        return outputs

    def _tell(self, plan: StepPlan, outputs: list[SequenceOutput], began: float) -> None:
        """What this turn was, to those who listen."""
        now = self._clock()
        host = now - began - self._waited
        if self.metrics is not None:
            self.metrics.record_step(plan, outputs, self.scheduler.stats(), StepTimes(host, self._device))
        if self.recorder is not None:
            begin, end = self._dispatch_span if plan.rows else (now, now)
            self.recorder.turned(plan, outputs, t=began, end=now, host=host, before=begin - began, dispatch=end - begin)

    def _dispatch(self, plan: StepPlan) -> list[SequenceOutput]:
        if not plan.rows:
            return []
        try:
            begin = self._clock()
            self._dispatch_span = begin, begin
            self._in_flight.append((plan, self.executor.dispatch(plan), begin))
            self._dispatch_span = begin, self._clock()
        except Exception as error:
            return self._fail(plan, error, "dispatch")
        return []

    def _collect(self) -> list[SequenceOutput]:
        plan, handle, dispatched = self._in_flight.popleft()
        began = self._clock()
        try:
            result = self.executor.collect(handle)
        except Exception as error:
            return self._fail(plan, error, "collect")
        now = self._clock()
        self._waited += now - began
        seconds = now - max(dispatched, self._last_collected)
        self._device = (self._device or 0.0) + seconds
        self._last_collected = now
        if self.recorder is not None:
            self.recorder.collected(plan.step_id, seconds)
        return self.scheduler.update(plan, result, now)

    def _fail(self, plan: StepPlan, error: Exception, where: str) -> list[SequenceOutput]:
        """A step raised: what is in flight is void and the executor starts with an empty cache."""
        logger.error("step %d with %d rows failed: %s", plan.step_id, len(plan.rows), type(error).__name__)
        logger.debug("step %d", plan.step_id, exc_info=error)
        if self.recorder is not None:
            self.recorder.failed(plan.step_id, where, [lost.step_id for lost, _, _ in self._in_flight])
        self._in_flight.clear()
        outputs = self.scheduler.fail(plan, error, self._clock())
        self.executor.reset()
        return outputs
