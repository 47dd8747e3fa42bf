"""A fleet on virtual time: jobs arrive, a router spreads them, every replica steps on its own clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from jcb.simulate.job import Job
from jcb.simulate.links import Link
from jcb.simulate.replica import Ended, Replica, ReplicaSpec, Turn
from jcb.simulate.router import RoundRobin, Router
from jcb.simulate.stats import RunStats
from jcb.types import FinishReason, RequestError

PROGRESS_EVERY = 1_000
"""Jobs that end between two calls of `progress`."""


class Workload(Protocol):
    """Where jobs come from."""

    def jobs(self) -> Iterator[Job]:
        """Those whose time is known, in the order of their times."""
        ...

    def after(self, job: Job, now: float) -> Job | None:
        """The job that the end of `job` brings about: a client's next request, a conversation's next turn."""
        ...


@dataclass(frozen=True, kw_only=True)
class PrefillPool:
    """Replicas that only compute prompts; K and V then travel over `link`. kv_bytes: of one token."""

    spec: ReplicaSpec
    replicas: int
    link: Link
    kv_bytes: int
    router: Router


class Simulation:
    """`replicas` engines of one kind behind a router; with `prefill` they only decode.

    on_turn hears of every turn of an engine, on_end of every job's end, progress(ended, time) now and then.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        workload: Workload,
        *,
        replicas: int = 1,
        router: Router | None = None,
        prefill: PrefillPool | None = None,
        on_turn: Callable[[Turn], object] | None = None,
        on_end: Callable[[Ended], object] | None = None,
        progress: Callable[[int, float], object] | None = None,
    ) -> None:
        if replicas < 1 or (prefill is not None and prefill.replicas < 1):
            raise ValueError(f"{replicas=} must be at least 1, in each pool")
        self.stats = RunStats(total_pages=spec.limits.usable_pages)
        self._workload = workload
        self._router = router or RoundRobin()
        self._prefill = prefill
        if prefill is not None:
            spec = replace(spec, transferred=True)
        self.replicas = [Replica(number, spec, self.stats, on_turn) for number in range(replicas)]
        self.prefill_replicas = (
            []
            if prefill is None
            else [Replica(replicas + n, prefill.spec, self.stats, on_turn) for n in range(prefill.replicas)]
        )
        self.stats.replicas = replicas + len(self.prefill_replicas)
        self._everyone = [*self.replicas, *self.prefill_replicas]
        self._on_end = on_end
        self._progress = progress
        self._order = itertools.count()
        self._due: list[tuple[float, int, Job]] = []  # jobs brought about by others, or on their way between pools
        self._busy: list[tuple[float, int]] = []  # replicas with work, by their clocks
        self._link_free_at: dict[int, float] = {}  # by prefill replica
        self._originals: dict[int, Job] = {}  # jobs that need both pools, until they end
        self._prefilled: dict[int, Ended] = {}  # how their first half went
        self._num_ended = 0

    def run(self) -> RunStats:
        """Runs every job to its end."""
        arrivals = iter(self._workload.jobs())
        upcoming = next(arrivals, None)
        while True:
            if upcoming is not None and (not self._due or upcoming.at <= self._due[0][0]):
                when, from_arrivals = upcoming.at, True
            else:
                when, from_arrivals = (self._due[0][0] if self._due else None), False
            if self._busy and (when is None or self._busy[0][0] < when):
                self._step()
            elif when is None:
                return self.stats
            elif from_arrivals:
                assert upcoming is not None
                self._send(upcoming)
                upcoming = next(arrivals, None)
            else:
                self._send(heapq.heappop(self._due)[2])

    def _send(self, job: Job) -> None:
        """To a replica of the pool that it needs now."""
        if self._prefill is None or job.first_token is not None:
            replica = self.replicas[self._router.choose(job, self.replicas)]
        else:
            replica = self.prefill_replicas[self._prefill.router.choose(job, self.prefill_replicas)]
            self._originals[job.number] = job
            job = replace(job, answer=job.answer[:1], max_tokens=1)
        self.stats.begin = min(self.stats.begin, job.at)
        was_idle = not replica.has_work
        try:
            replica.add(job)
        except RequestError:
            self.stats.refused += 1
            self._after(self._originals.pop(job.number, job), job.at)
            return
        if was_idle:
            heapq.heappush(self._busy, (replica.now, replica.number))

    def _step(self) -> None:
        _, number = heapq.heappop(self._busy)
        replica = self._everyone[number]
        for ended in replica.step():
            if ended.job.number not in self._originals:
                self._finish(ended)
            elif ended.job.first_token is None:
                self._end_prefill(ended)
            else:
                self._end_decode(ended)
        if replica.has_work:
            heapq.heappush(self._busy, (replica.now, number))

    def _end_prefill(self, ended: Ended) -> None:
        """The pages go over the replica's link, one prompt after another."""
        assert self._prefill is not None
        job = self._originals[ended.job.number]
        if ended.first_token is None or job.output_tokens == 1:
            del self._originals[job.number]
            self._finish(replace(ended, job=job))
            return
        begin = max(ended.now, self._link_free_at.get(ended.replica, 0.0))
        arrives = begin + self._prefill.link.seconds(len(job.prompt) * self._prefill.kv_bytes)
        self._link_free_at[ended.replica] = arrives
        self._prefilled[job.number] = ended
        rest = replace(
            job,
            at=arrives,
            prompt=(*job.prompt, job.answer[0]),
            answer=job.answer[1:],
            max_tokens=max(job.max_tokens, job.output_tokens) - 1,
            first_token=ended.first_token,
        )
        heapq.heappush(self._due, (arrives, next(self._order), rest))

    def _end_decode(self, ended: Ended) -> None:
        first = self._prefilled.pop(ended.job.number)
        self._finish(
            replace(
                ended,
                job=self._originals.pop(ended.job.number),
                first_scheduled=first.first_scheduled,
                first_token=first.first_token,
                output_tokens=ended.output_tokens + 1,
                cached_tokens=first.cached_tokens,
                preemptions=first.preemptions + ended.preemptions,
            )
        )

    def _finish(self, ended: Ended) -> None:
        stats, job = self.stats, ended.job
        stats.end = max(stats.end, ended.now)
        if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
            stats.finished += 1
            stats.prompt_tokens += len(job.prompt)
            stats.output_tokens += ended.output_tokens
            stats.cached_tokens += ended.cached_tokens
            stats.latency.add(ended.now - job.at)
            if ended.first_scheduled is not None:
                stats.queue.add(max(ended.first_scheduled - job.at, 0.0))
            if ended.first_token is not None and ended.output_tokens > 1:
                stats.tpot.add((ended.now - ended.first_token) / (ended.output_tokens - 1))
        elif ended.reason is FinishReason.ABORT:
            stats.aborted += 1
        else:
            stats.failed += 1
        if self._on_end is not None:
            self._on_end(ended)
        self._num_ended += 1
        if self._progress is not None and self._num_ended % PROGRESS_EVERY == 0:
            self._progress(self._num_ended, ended.now)
        self._after(job, ended.now)

    def _after(self, job: Job, now: float) -> None:
        following = self._workload.after(job, now)
        if following is not None:
            heapq.heappush(self._due, (following.at, next(self._order), following))
