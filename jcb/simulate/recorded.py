"""A recorded run as traffic to simulate, and as figures to compare with.

Token ids are made up again from the numbers of pages: equal pages get equal ids, so prefixes are shared as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jcb.recording import Abort, Arrival, End, Recording, Step
from jcb.simulate.job import VOCAB_SIZE, Job
from jcb.simulate.stats import RunStats
from jcb.types import FinishReason, RowKind

_TAILS = 1 << 30  # numbers from here on stand for what follows a request's last full page


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request from its arrival to its end; no end where the recording stops before it."""

    arrival: Arrival
    end: End | None
    abort: Abort | None

    def tokens(self, page_size: int, vocab_size: int) -> tuple[int, ...]:
        """Ids of prompt and answer, below `vocab_size` - 1."""
        chain = self.arrival.chain if self.end is None else self.end.chain
        length = self.arrival.prompt_tokens + (0 if self.end is None else self.end.output_tokens)
        tokens: list[int] = []
        for number in chain:
            tokens += page_tokens(number, page_size, vocab_size)
        while len(tokens) < length:
            tokens += page_tokens(_TAILS + self.arrival.id, page_size, vocab_size)
        return tuple(tokens[:length])


def page_tokens(number: int, page_size: int, vocab_size: int) -> list[int]:
    """Made-up ids of the page with this number: its digits, so that different pages differ."""
    base, digits = vocab_size - 1, []
    for _ in range(page_size):
        number, digit = divmod(number, base)
        digits.append(digit)
    return digits


def requests_of(recording: Recording) -> list[RecordedRequest]:
    """Every request of a recording in the order of arrival."""
    arrivals: dict[int, Arrival] = {}
    ends: dict[int, End] = {}
    aborts: dict[int, Abort] = {}
    for event in recording:
        if isinstance(event, Arrival):
            arrivals[event.id] = event
        elif isinstance(event, End):
            ends[event.id] = event
        elif isinstance(event, Abort):
            aborts[event.id] = event
    return [RecordedRequest(arrival, ends.get(id_), aborts.get(id_)) for id_, arrival in arrivals.items()]


class RecordedWorkload:
    """The requests of a recording, sent when they were sent then, each with an answer of the same length.

    A client that left leaves after as many tokens; one that left without any is left out, as are requests that failed
    or had not ended. scale: factor on all times of arrival.
    """

    def __init__(self, recording: Recording, *, scale: float = 1.0, vocab_size: int = VOCAB_SIZE) -> None:
        if not scale > 0:
            raise ValueError(f"{scale=} must be above 0")
        page_size = recording.limits().page_size
        self.requests = [each for each in requests_of(recording) if _can_be_repeated(each)]
        if not self.requests:
            raise ValueError(f"{recording.path} holds no request that came to its end")
        begin = min(sent_at(each.arrival) for each in self.requests)
        self._jobs = [
            _job(each, (sent_at(each.arrival) - begin) * scale, page_size, vocab_size) for each in self.requests
        ]
        self._jobs.sort(key=lambda job: (job.at, job.number))

    def jobs(self) -> Iterator[Job]:
        """All of them: their times are known."""
        return iter(self._jobs)

    def after(self, job: Job, now: float) -> Job | None:
        """Nothing follows from an end."""
        del job, now
        return None


def sent_at(arrival: Arrival) -> float:
    """When the client sent it; where that was not told, when the engine took it in."""
    return arrival.arrived if 0 <= arrival.t - arrival.arrived < 3600 else arrival.t


def _can_be_repeated(request: RecordedRequest) -> bool:
    return request.end is not None and request.end.output_tokens > 0 and request.end.reason != FinishReason.ERROR


def _job(request: RecordedRequest, at: float, page_size: int, vocab_size: int) -> Job:
    arrival, end = request.arrival, request.end
    assert end is not None
    tokens = request.tokens(page_size, vocab_size)
    left = end.reason == FinishReason.ABORT
    return Job(
        number=arrival.id,
        at=at,
        prompt=tokens[: arrival.prompt_tokens],
        answer=tokens[arrival.prompt_tokens :] + ((0,) if left else ()),
        max_tokens=arrival.max_tokens,
        priority=arrival.priority,
        namespace=str(arrival.namespace),
        abort_after=end.output_tokens if left else None,
    )


def recorded_stats(recording: Recording) -> RunStats:
    """What the recorded run came to, in the figures of a simulated one."""
    stats = RunStats(total_pages=recording.limits().usable_pages)
    live: dict[int, _Progress] = {}
    pages = _Pages()
    for event in recording:
        if isinstance(event, Arrival):
            live[event.id] = _Progress(event)
            stats.begin = min(stats.begin, sent_at(event))
        elif isinstance(event, Step) and event.rows:
            _count_step(stats, event, live)
            pages.step(event)
            stats.peak_pages = max(stats.peak_pages, pages.num_held)
        elif isinstance(event, End):
            _count_end(stats, event, live.pop(event.id))
            pages.release(event.id)
    return stats


@dataclass(slots=True)
class _Progress:
    arrival: Arrival
    scheduled: float | None = None
    cached: int = 0


class _Pages:
    """How many pages sequences hold, each counted once however many share it."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}
        self._refs: dict[int, int] = {}

    @property
    def num_held(self) -> int:
        return len(self._refs)

    def step(self, step: Step) -> None:
        for id_ in step.preempted:
            self.release(id_)
        for row in step.rows:
            self._tables.setdefault(row.id, []).extend(row.pages)
            for page in row.pages:
                self._refs[page] = self._refs.get(page, 0) + 1

    def release(self, id_: int) -> None:
        for page in self._tables.pop(id_, ()):
            self._refs[page] -= 1
            if not self._refs[page]:
                del self._refs[page]


def _count_step(stats: RunStats, step: Step, live: dict[int, _Progress]) -> None:
    stats.steps += 1
    stats.tokens += step.num_tokens
    stats.padded_tokens += step.bucket[0]
    stats.preemptions += len(step.preempted)
    stats.occupancy.add(len(step.rows))
    if not step.failed:
        stats.busy += step.device
        stats.step.add(step.device)
        stats.gaps.add(step.device, sum(row.samples for row in step.rows))
    for row in step.rows:
        if row.kind is RowKind.NEW and row.id in live:
            live[row.id].scheduled, live[row.id].cached = step.t, row.start


def _count_end(stats: RunStats, end: End, progress: _Progress) -> None:
    sent = sent_at(progress.arrival)
    stats.end = max(stats.end, end.t)
    if end.first_token_t is not None:
        stats.ttft.add(end.first_token_t - sent)
    if end.reason == FinishReason.ABORT:
        stats.aborted += 1
        return
    if end.reason == FinishReason.ERROR:
        stats.failed += 1
        return
    stats.finished += 1
    stats.prompt_tokens += progress.arrival.prompt_tokens
    stats.output_tokens += end.output_tokens
    stats.cached_tokens += progress.cached
    stats.latency.add(end.t - sent)
    if progress.scheduled is not None:
        stats.queue.add(max(progress.scheduled - sent, 0.0))
    if end.first_token_t is not None and end.output_tokens > 1:
        stats.tpot.add((end.t - end.first_token_t) / (end.output_tokens - 1))


def lengths_of(requests: Seq[RecordedRequest]) -> list[tuple[int, int]]:
    """(prompt, output) tokens of requests that ended well."""
    return [
        (each.arrival.prompt_tokens, each.end.output_tokens)
        for each in requests
        if each.end is not None and _can_be_repeated(each)
    ]
