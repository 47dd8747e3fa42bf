"""What the last steps did, for those who watch: slots, kinds, pages and times; no text, no token id, no request id.

Written by the engine's thread, read by the event loop without a lock: entry n lies in one place until entry
n + SIZE replaces it whole. A reader that falls behind loses steps, never memory. With nobody watching nothing is kept.
"""

from __future__ import annotations

import math
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jcb.metrics import EngineMetrics, StepTimes
from jcb.types import RequestError, ScheduledRow, Sequence, SequenceOutput, SequenceStatus, StepPlan

SIZE = 512
"""Steps kept."""

MAX_WATCHERS = 16
"""Most readers at once."""

CACHED_SECONDS = 0.25
"""How often a step tells which pages the prefix cache holds."""

Fields = dict[str, Any]


@dataclass(slots=True, eq=False)
class Guest:
    """A sequence that holds a slot, under a number of the feed's own."""

    number: int
    sequence: Sequence
    slot: int  # -1: it was preempted and waits
    prompt: int  # tokens of its prompt
    pages: tuple[int, ...] = ()
    turn: int = 0  # of the feed, when it last had a row
    last_token: float = 0.0  # when its last token came, on the engine's clock; 0: none has

    def fields(self) -> Fields:
        """What a reader is told of it once."""
        sequence = self.sequence
        first, request = sequence.first_scheduled_time, sequence.request
        return {
            "id": self.number,
            "slot": self.slot,
            "prompt": self.prompt,
            "most": request.max_tokens,
            "cached": sequence.num_cached,
            "queued_ms": _ms(0.0 if first is None else first - request.arrival_time),
        }


@dataclass(slots=True)
class Entry:
    """One step as JSON fields; encoded once, by the first reader."""

    number: int
    fields: Fields
    encoded: bytes = b""


class StepFeed:
    """Hears of every step after `metrics` did, and keeps the last ones while somebody watches.

    cached: pages that only the prefix cache holds, asked for in the engine's thread.
    """

    def __init__(
        self, metrics: EngineMetrics, cached: Callable[[], Iterable[int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._cached = cached
        self._clock = clock
        self._origin = clock()
        self._ring: list[Entry | None] = [None] * SIZE
        self._guests: dict[str, Guest] = {}  # by request id
        self._num_guests = 0
        self._turn = 0
        self._cached_told = -math.inf
        self.head = 0  # number of the last entry
        self.num_watchers = 0

    # -- the engine's thread

    def record_step(
        self, plan: StepPlan, outputs: list[SequenceOutput], stats: Mapping[str, int], times: StepTimes
    ) -> None:
        """Keeps a step; a turn without rows and outputs is none."""
        self._metrics.record_step(plan, outputs, stats, times)
        if not self.num_watchers:
            self._forget()
        elif plan.rows or outputs:
            self._append(self._fields(plan, outputs, stats, times))

    def record_rest(self, stats: Mapping[str, int]) -> None:
        """Tells once that nothing runs any more: how requests that were aborted are seen to leave."""
        if self.num_watchers and self._guests:
            self._cached_told = -math.inf
            self._append(self._fields(StepPlan(0, ()), [], stats, StepTimes(0.0)))

    def _append(self, fields: Fields) -> None:
        number = self.head + 1
        self._ring[number % SIZE] = Entry(number, fields)
        self.head = number

    def _forget(self) -> None:
        if self._guests:
            self._guests.clear()
        if self._ring[self.head % SIZE] is not None:
            self._ring = [None] * SIZE

    def _fields(
        self, plan: StepPlan, outputs: list[SequenceOutput], stats: Mapping[str, int], times: StepTimes
    ) -> Fields:
        now = self._clock()
        self._turn += 1
        draft = Draft()
        tokens, gaps, first = self._tokens(outputs, now)
        rows = [self._row(row, draft) for row in plan.rows]
        fields: Fields = {
            "t": round(now - self._origin, 4),
            "host_ms": _ms(times.host),
            "device_ms": None if times.device is None else _ms(times.device),
            "size": max(self._metrics.step_size, sum([row[3] for row in rows])) if rows else 0,
            "rows": rows,
            "joined": draft.joined,
            "pages": draft.pages,
            "left": [] if len(rows) == len(self._guests) else self._part(),
            "preempted": len(plan.preempted),
            "tokens": tokens,
            "ttft_ms": first,
            "itl_ms": gaps,
            "ended": sum(output.finish_reason is not None for output in outputs),
            "running": stats["running"],
            "waiting": stats["waiting"],
            "used": stats["pages_used"],
            "cached": stats["pages_cached"],
            "hit_tokens": stats["prefix_hit_tokens"],
            "queried_tokens": stats["prefix_queried_tokens"],
        }
        if now - self._cached_told >= CACHED_SECONDS:
            self._cached_told = now
            fields["cached_map"] = bitmap(self._cached(), stats["pages_total"] + 1)
        return fields

    def _row(self, row: ScheduledRow, draft: Draft) -> tuple[int, int, int, int, int]:
        """[number, slot, start, q_len, kind]; kind: 0 prefill, 1 decode, 2 prefill again after a preemption."""
        sequence, table, q_len = row.sequence, row.page_table, row.q_len
        guest = self._guests.get(sequence.request.request_id)
        if guest is None or guest.sequence is not sequence:
            guest = self._join(sequence, row.slot, draft)
        guest.turn = self._turn
        if guest.pages is not table:
            known = row.num_known_pages(guest.pages)
            draft.pages.append([guest.number, known, table[known:]])
            guest.pages, guest.slot = table, row.slot
        kind = 1 if q_len == 1 and row.start >= guest.prompt else 2 if sequence.num_preemptions else 0
        return guest.number, guest.slot, row.start, q_len, kind

    def _join(self, sequence: Sequence, slot: int, draft: Draft) -> Guest:
        self._num_guests += 1
        request = sequence.request
        guest = Guest(self._num_guests, sequence, slot, len(request.prompt_token_ids))
        self._guests[request.request_id] = guest
        draft.joined.append(guest.fields())
        return guest

    def _part(self) -> list[int]:
        """Numbers of the guests that hold no slot any more; those that ended are forgotten."""
        left = []
        for name, guest in list(self._guests.items()):
            status = guest.sequence.status
            if guest.turn == self._turn or status is SequenceStatus.RUNNING:
                continue
            if guest.slot >= 0:
                left.append(guest.number)
                guest.slot, guest.pages = -1, ()
            if status is SequenceStatus.FINISHED:
                del self._guests[name]
        return left

    def _tokens(self, outputs: list[SequenceOutput], now: float) -> tuple[int, list[list[float]], list[float]]:
        """Tokens gained; times between two of a sequence as [ms, how often]; times to the first ones."""
        total, spans, first = 0, dict[tuple[float, int], int](), list[float]()
        guests = self._guests
        for output in outputs:
            count = len(output.token_ids)
            total += count
            guest = guests.get(output.request_id)
            if guest is None or not count:
                continue
            if guest.last_token:
                span = guest.last_token, count  # the same for nearly all rows of a step
                spans[span] = spans.get(span, 0) + count
            elif guest.sequence.num_preemptions == 0 and len(guest.sequence.output_token_ids) == count:
                first.append(_ms(now - guest.sequence.request.arrival_time))
            guest.last_token = now
        gaps = [[_ms((now - last) / count), times] for (last, count), times in spans.items()]
        return total, gaps, first

    # -- the event loop

    def watch(self) -> Watcher:
        """A reader from now on; RequestError 429 when there are too many. Close it."""
        if self.num_watchers >= MAX_WATCHERS:
            raise RequestError(
                f"{MAX_WATCHERS} readers watch already", status=429, code="too_many_watchers", retry_after=5.0
            )
        self.num_watchers += 1
        return Watcher(self)

    def entry(self, number: int) -> Entry | None:
        """Entry `number`, if it is still kept."""
        entry = self._ring[number % SIZE]
        return entry if entry is not None and entry.number == number else None

    def guests(self) -> list[Fields]:
        """Who holds which pages now; applying entries that it already holds changes nothing."""
        return [guest.fields() | {"pages": guest.pages} for guest in list(self._guests.values())]


@dataclass(slots=True)
class Draft:
    """A step's news while they are gathered."""

    joined: list[Fields] = field(default_factory=list)
    pages: list[list[Any]] = field(default_factory=list)


class Watcher:
    """One reader of a feed. `take` tells what is new; `lost` counts entries that were replaced before it came."""

    def __init__(self, feed: StepFeed) -> None:
        self._feed = feed
        self._is_open = True
        self.last = feed.head
        self.lost = 0

    def take(self, most: int) -> list[Entry] | None:
        """At most `most` new entries in order; None when some were lost: then start from `StepFeed.guests` again."""
        entries: list[Entry] = []
        head = self._feed.head
        while self.last < head and len(entries) < most:
            entry = self._feed.entry(self.last + 1)
            if entry is None:
                self.lost += head - self.last
                self.last = head
                return None
            entries.append(entry)
            self.last += 1
        return entries

    def close(self) -> None:
        """Leaves; the last one out stops the recording."""
        if self._is_open:
            self._is_open = False
            self._feed.num_watchers -= 1


def bitmap(pages: Iterable[int], count: int) -> str:
    """Base64 of `count` bits, bit i (lowest first) set for page i."""
    bits = np.zeros(count, np.uint8)
    bits[np.fromiter(pages, np.int64)] = 1
    return b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()


def _ms(seconds: float) -> float:
    return round(1e3 * max(seconds, 0.0), 1)
