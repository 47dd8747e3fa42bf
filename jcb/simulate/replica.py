"""One engine on a clock of its own: the production core and scheduler over a pretended device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jcb.config import Limits, SchedulerConfig
from jcb.engine.core import EngineCore
from jcb.metrics import StepTimes
from jcb.scheduler.scheduler import Scheduler
from jcb.simulate.clock import VirtualClock
from jcb.simulate.cost import CostModel, HostCost, StepWork, work_of, work_without_transferred
from jcb.simulate.executor import SimExecutor
from jcb.simulate.job import Job, known_token, request_of
from jcb.simulate.stats import RunStats
from jcb.steps.shapes import Shapes
from jcb.types import FinishReason, RowKind, Sequence, SequenceOutput, StepPlan


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """What makes an engine. transferred: it decodes only; prompts of new requests were computed elsewhere."""

    scheduler: SchedulerConfig
    limits: Limits
    shapes: Shapes
    cost: CostModel
    host: HostCost
    enable_prefix_caching: bool = True
    overlap: bool = True
    transferred: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one engine, for observers. work: None where nothing was dispatched."""

    replica: int
    began: float
    ended: float
    plan: StepPlan
    work: StepWork | None
    device_seconds: float
    outputs: list[SequenceOutput]
    stats: Mapping[str, int]  # the scheduler's


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's end. first_token: None where it got none."""

    job: Job
    replica: int
    now: float
    reason: FinishReason
    first_scheduled: float | None
    first_token: float | None
    output_tokens: int
    cached_tokens: int
    preemptions: int


class Replica:
    """Runs jobs. `now` is its clock; it is idle when `has_work` is False.

    stats: where everything is summed up, shared by all replicas of a run. on_turn: hears of every turn.
    """

    def __init__(
        self, number: int, spec: ReplicaSpec, stats: RunStats, on_turn: Callable[[Turn], object] | None = None
    ) -> None:
        self.number = number
        self.spec = spec
        self._stats = stats
        self._on_turn = on_turn
        self._clock = VirtualClock()
        self._work_of = work_without_transferred if spec.transferred else work_of
        self._executor = SimExecutor(
            self._clock, self._cost, vocab_size=spec.limits.vocab_size, host=spec.host, tokens=known_token
        )
        self._scheduler = Scheduler(
            spec.scheduler, spec.limits, enable_prefix_caching=spec.enable_prefix_caching, root=b"simulation"
        )
        self.core = EngineCore(self._scheduler, self._executor, overlap=spec.overlap, clock=self._clock, metrics=self)
        self._jobs: dict[str, Job] = {}
        self._sequences: dict[str, Sequence] = {}  # of jobs that have been scheduled
        self._silent: set[str] = set()  # jobs without a token so far
        self._impatient: dict[str, Job] = {}  # jobs whose client will leave
        self._ended: list[Ended] = []
        self._began = 0.0
        self._last_tokens = 0.0  # when tokens came last
        self._work: StepWork | None = None
        self._seconds = 0.0

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def load(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Queue a job; an idle engine wakes up when it was sent. RequestError when it is refused."""
        self._clock.advance_to(job.at)
        name = str(job.number)
        self.core.add(request_of(job, name))
        self._jobs[name] = job
        self._silent.add(name)
        if job.abort_after is not None:
            self._impatient[name] = job

    def step(self) -> list[Ended]:
        """One turn of the loop; the jobs that ended in it. RuntimeError when nothing can ever happen."""
        self._began, self._ended, self._work = self._clock(), [], None
        self.core.step()
        if self._impatient:
            self._let_leave()
        if self._work is None and not self._ended and self._clock() == self._began:
            raise RuntimeError(f"replica {self.number} has {self.load} jobs and does nothing at {self._began:g} s")
        return self._ended

    def record_step(
        self, plan: StepPlan, outputs: list[SequenceOutput], stats: dict[str, int], times: StepTimes
    ) -> None:
        """Hears of every turn from the core, as it ends."""
        del times
        if plan.rows:
            self._note_plan(plan, stats)
        if outputs:
            self._note_outputs(outputs, self._clock())
        if self._on_turn is not None:
            seconds = self._seconds if plan.rows else 0.0
            self._on_turn(Turn(self.number, self._began, self._clock(), plan, self._work, seconds, outputs, stats))

    def _note_plan(self, plan: StepPlan, stats: dict[str, int]) -> None:
        run, work = self._stats, self._work
        assert work is not None
        if self._silent:
            for row in plan.rows:
                if row.kind is RowKind.NEW:
                    self._sequences[row.sequence.request_id] = row.sequence
        run.steps += 1
        run.tokens += work.tokens
        run.padded_tokens += work.padded_tokens
        run.busy += self._seconds
        run.step.add(self._seconds)
        run.occupancy.add(work.rows)
        run.preemptions += len(plan.preempted)
        run.peak_pages = max(run.peak_pages, stats["pages_used"])

    def _note_outputs(self, outputs: list[SequenceOutput], now: float) -> None:
        run, firsts, silent = self._stats, 0, self._silent
        if silent:
            for output in outputs:
                name = output.request_id
                if output.token_ids and name in silent:
                    silent.discard(name)
                    firsts += 1
                    job = self._jobs[name]
                    if job.first_token is None:
                        run.ttft.add(now - job.at)
                    else:
                        run.gaps.add(now - job.first_token)
        run.gaps.add(now - self._last_tokens, len(outputs) - firsts)
        self._last_tokens = now
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output, now)

    def _end(self, output: SequenceOutput, now: float) -> None:
        name = output.request_id
        job, sequence = self._jobs.pop(name), self._sequences.pop(name, None)
        self._silent.discard(name)
        self._impatient.pop(name, None)
        assert output.finish_reason is not None
        self._ended.append(
            Ended(
                job=job,
                replica=self.number,
                now=now,
                reason=output.finish_reason,
                first_scheduled=None if sequence is None else sequence.first_scheduled_time,
                first_token=None if sequence is None else sequence.first_token_time,
                output_tokens=0 if sequence is None else len(sequence.output_token_ids),
                cached_tokens=0 if sequence is None else sequence.num_cached,
                preemptions=0 if sequence is None else sequence.num_preemptions,
            )
        )

    def _let_leave(self) -> None:
        """Clients that have seen enough hang up."""
        for name, job in list(self._impatient.items()):
            sequence = self._sequences.get(name)
            if sequence is not None and len(sequence.output_token_ids) >= (job.abort_after or 0):
                output = self.core.abort(name)
                assert output is not None
                self._end(output, self._clock())

    def _cost(self, plan: StepPlan) -> float:
        self._work = self._work_of(plan, self.spec.shapes)
        self._seconds = self.spec.cost.seconds(self._work)
        return self._seconds
