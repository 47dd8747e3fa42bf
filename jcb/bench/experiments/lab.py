"""Where an experiment runs, and what it sees of a run: each request, and when each of its tokens was there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jcb.engine.core import EngineCore
from jcb.simulate import what_if
from jcb.simulate.job import Job
from jcb.simulate.replica import Turn
from jcb.simulate.simulation import Workload
from jcb.types import SequenceOutput, StepPlan

Settings = Mapping[str, object]
"""Settings of ServeConfig by full path."""

Watch = Callable[[Turn, EngineCore], object]
"""Hears of every turn, and may turn the scheduler's knobs."""

PATIENT = {f"scheduler.{name}": value for name, value in what_if.PATIENT.items()}
"""Nobody is refused or timed out."""


@dataclass(slots=True)
class Track:
    """One request: when it was sent, and when each of its tokens was there. Seconds from the run's begin."""

    job: Job
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.job.at

    @property
    def latency(self) -> float:
        return self.token_times[-1] - self.job.at

    @property
    def tpot(self) -> float:
        """Mean time between two tokens; nan of a single one."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else math.nan


@dataclass(slots=True)
class Run:
    """What came of a workload: its requests by number."""

    tracks: dict[int, Track] = field(default_factory=dict)
    preemptions: int = 0
    cached_tokens: int = 0
    busy: float = 0.0

    def values(self, name: str) -> np.ndarray:
        """One figure of every request that got tokens, by its name in Track."""
        found = np.array([getattr(track, name) for track in self.tracks.values() if track.token_times])
        return found[~np.isnan(found)]

    def quantile(self, name: str, share: float) -> float:
        """A quantile of `values`."""
        return float(np.quantile(self.values(name), share))

    @property
    def output_tokens(self) -> int:
        return sum(len(track.token_times) for track in self.tracks.values())

    @property
    def seconds(self) -> float:
        """From the first request sent to the last token."""
        done = [track for track in self.tracks.values() if track.token_times]
        return max(t.token_times[-1] for t in done) - min(t.job.at for t in done)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds


class Lab(Protocol):
    """Runs workloads. title: chip or machine, for pictures; model: the model's name there; chip: its short name."""

    model: str
    title: str
    chip: str
    is_real: bool

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    def run(self, workload: Workload, settings: Settings, watch: Watch | None = None) -> Run:
        """Every job to its end, under `settings` on top of the lab's own."""
        ...


@dataclass
class Traced:
    """A workload whose jobs are noted in a run."""

    workload: Workload
    run: Run

    def jobs(self) -> Iterator[Job]:
        for job in self.workload.jobs():
            yield self._note(job)

    def after(self, job: Job, now: float) -> Job | None:
        following = self.workload.after(self.run.tracks[job.number].job, now)
        return None if following is None else self._note(following)

    def _note(self, job: Job) -> Job:
        self.run.tracks[job.number] = Track(job)
        return job


def note_turn(run: Run, plan: StepPlan, outputs: list[SequenceOutput], now: float) -> None:
    """Take one turn into `run`."""
    run.preemptions += len(plan.preempted)
    for output in outputs:
        if output.token_ids:
            run.tracks[int(output.request_id)].token_times += [now] * len(output.token_ids)
        if output.finish_reason is not None:
            run.cached_tokens += output.num_cached_tokens
