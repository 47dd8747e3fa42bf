"""The very run of a recording again: events in their order and with their times, through the real core and scheduler.

Whatever the scheduler decides must then be what it decided; the first plan that differs is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jcb.engine.core import EngineCore
from jcb.recording import Abort, Arrival, End, Knobs, Recording, Row, Step
from jcb.scheduler.scheduler import Scheduler
from jcb.simulate.clock import VirtualClock
from jcb.simulate.recorded import RecordedRequest, requests_of
from jcb.types import (
    MAX_LOGPROBS,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    ScheduledRow,
    SequenceOutput,
    StepPlan,
    StepResult,
)

_OWN_ERRORS = ("non_finite_logits", "invalid_token")  # ends that a device's outputs bring about


@dataclass(frozen=True)
class Difference:
    """The first thing that did not come again as it was. at: the turn's number in the recording."""

    at: int
    what: str
    recorded: object
    replayed: object


@dataclass(frozen=True)
class Replayed:
    """How far a replay agreed with its recording."""

    steps: int
    ends: int
    difference: Difference | None


class _AnyToken:
    """A grammar that accepts everything; what it did to a plan is that its rows wait for their tokens."""

    accepts, is_complete, error = True, False, None
    end_ids: frozenset[int] = frozenset()
    mask = np.zeros(1, np.int32)

    def start(self, held_back: frozenset[int]) -> _AnyToken:
        del held_back
        return self

    def advance(self, token_id: int, held_back: frozenset[int]) -> None:
        """Any token will do."""


class RecordedExecutor:
    """Takes as long as the recording says, and fails where it failed. `step` is set before each turn."""

    def __init__(self, clock: VirtualClock, requests: dict[str, RecordedRequest], answers: dict[str, tuple[int, ...]],
                 stop_token: int) -> None:  # fmt: skip
        self._clock = clock
        self._requests = requests
        self._answers = answers
        self._stop = stop_token
        self._free_at = 0.0
        self.step: Step | None = None

    def reset(self) -> None:
        """What was in flight is void."""
        self._free_at = self._clock()

    def dispatch(self, plan: StepPlan) -> tuple[StepPlan, Step, float]:
        """Begin the recorded step now or when the one before is done."""
        assert self.step is not None
        self._clock.advance(self.step.before)
        if self.step.failed == "dispatch":
            raise RuntimeError("the recorded step failed")
        self._free_at = max(self._free_at, self._clock()) + self.step.device
        self._clock.advance(self.step.dispatch)
        return plan, self.step, self._free_at

    def collect(self, handle: tuple[StepPlan, Step, float]) -> StepResult:
        """Its tokens, when it was done."""
        plan, step, done_at = handle
        self._clock.advance_to(done_at)
        if step.failed == "collect":
            raise RuntimeError("the recorded step failed")
        size = len(plan.rows)
        return StepResult(
            plan.step_id,
            np.array([self._token(row) for row in plan.rows], np.int32),
            np.zeros(size, np.float32),
            np.zeros((size, MAX_LOGPROBS), np.int32),
            np.zeros((size, MAX_LOGPROBS), np.float32),
            np.array([not self._breaks(row) for row in plan.rows], np.bool_),
        )

    def _token(self, row: ScheduledRow) -> int:
        name = row.sequence.request_id
        end, answer = self._requests[name].end, self._answers[name]
        stops = end is not None and self._requests[name].abort is None and end.reason == FinishReason.STOP
        if stops and row.num_output + 1 == len(answer):
            return self._stop
        return answer[row.num_output] if row.num_output < len(answer) else 0

    def _breaks(self, row: ScheduledRow) -> bool:
        end = self._requests[row.sequence.request_id].end
        return end is not None and end.code in _OWN_ERRORS and row.samples and row.num_output == end.output_tokens


class Replay:
    """One pass over a recording. `run` compares; `turns` gives the recorded and the new rows of each turn."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        limits, config = recording.limits(), recording.scheduler_config()
        self._limits = limits
        self._requests = {str(each.arrival.id): each for each in requests_of(recording)}
        tokens = {name: each.tokens(limits.page_size, limits.vocab_size) for name, each in self._requests.items()}
        self._prompts = {name: ids[: self._requests[name].arrival.prompt_tokens] for name, ids in tokens.items()}
        answers = {name: ids[len(self._prompts[name]) :] for name, ids in tokens.items()}
        self._clock = VirtualClock()
        self._executor = RecordedExecutor(self._clock, self._requests, answers, limits.vocab_size - 1)
        scheduler = Scheduler(config, limits, enable_prefix_caching=recording.enable_prefix_caching, root=b"replay")
        self._core = EngineCore(scheduler, self._executor, overlap=recording.overlap, clock=self._clock, metrics=self)
        self._tables: dict[str, tuple[int, ...]] = {}
        self._plan = StepPlan(0, ())
        self._lengths: dict[str, int] = {}  # tokens so far
        self._ends: dict[int, tuple[str, int]] = {}

    def record_step(self, plan: StepPlan, outputs: list[SequenceOutput], stats: object, times: object) -> None:
        """Hears of every turn from the core."""
        del outputs, stats, times
        self._plan = plan

    def run(self) -> Replayed:
        """Replays up to the first difference, or to the end."""
        steps = ends = 0
        try:
            for event in self._recording:
                if isinstance(event, Step):
                    rows, preempted = self._turn(event)
                    if (self._plan.step_id, rows, preempted) != (event.step, event.rows, event.preempted):
                        recorded = (event.step, event.rows, event.preempted)
                        new = (self._plan.step_id, rows, preempted)
                        return Replayed(steps, ends, Difference(steps, "plan", recorded, new))
                    steps += 1
                elif isinstance(event, End):
                    expected = (event.reason, event.output_tokens)
                    if (got := self._ends.pop(event.id, None)) != expected:
                        return Replayed(steps, ends, Difference(steps, f"end of {event.id}", expected, got))
                    ends += 1
                else:
                    self._apply(event)
        except RequestError as error:
            return Replayed(steps, ends, Difference(steps, "admission", "admitted", error.message))
        return Replayed(steps, ends, None)

    def turns(self) -> Iterator[tuple[Step, tuple[Row, ...]]]:
        """Each recorded turn with the rows that came of it now."""
        for event in self._recording:
            if isinstance(event, Step):
                yield event, self._turn(event)[0]
            elif not isinstance(event, End):
                self._apply(event)

    def _apply(self, event: object) -> None:
        if isinstance(event, Arrival):
            self._clock.advance_to(event.t)
            self._core.add(self._request(event))
        elif isinstance(event, Abort):
            self._clock.advance_to(event.t)
            self._note(self._core.abort(str(event.id), FinishReason(event.reason)))
        elif isinstance(event, Knobs):
            self._core.turn(event.changes)

    def _turn(self, step: Step) -> tuple[tuple[Row, ...], tuple[int, ...]]:
        self._clock.advance_to(step.t)
        self._executor.step = step
        for output in self._core.step():
            self._note(output)
        rows = tuple([self._row(row) for row in self._plan.rows])
        return rows, tuple(int(name) for name in self._plan.preempted)

    def _row(self, row: ScheduledRow) -> Row:
        name = row.sequence.request_id
        known = row.num_known_pages(self._tables.get(name, ()))
        self._tables[name] = row.page_table
        return Row(int(name), row.slot, row.start, row.q_len, row.kind, row.samples, row.page_table[known:])

    def _note(self, output: SequenceOutput | None) -> None:
        if output is None:
            return
        name = output.request_id
        self._lengths[name] = self._lengths.get(name, 0) + len(output.token_ids)
        if output.finish_reason is not None:
            self._ends[int(name)] = (output.finish_reason.value, self._lengths.pop(name))

    def _request(self, arrival: Arrival) -> Request:
        name, limits = str(arrival.id), self._limits
        params = SamplingParams(
            max_tokens=None if arrival.is_open else arrival.max_tokens,
            stop_token_ids=(limits.vocab_size - 1,),
            prompt_logprobs=0 if arrival.prompt_logprobs else None,
        )
        return Request(
            request_id=name,
            prompt_token_ids=self._prompts[name],
            params=params,
            arrival_time=arrival.arrived,
            priority=arrival.priority,
            namespace=str(arrival.namespace),
            max_tokens=arrival.max_tokens,
            grammar=_AnyToken() if arrival.guided else None,
        )
