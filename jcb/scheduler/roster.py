"""Who is here: every live sequence, waiting or running, its slot and its deadline."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter

from jcb.scheduler.heap import KeyedHeap
from jcb.scheduler.record import Order, Record
from jcb.types import Request, SequenceStatus

_by_order = attrgetter("order")


class Roster:
    """Live records by id; each either waits, with neither slot nor pages, or runs in a slot of its own.

    The lowest free slot is taken first, so the batch stays dense. A slot is kept for a whole residency.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._live: dict[str, Record] = {}
        self._running: list[Record] = []  # by order
        self._waiting = KeyedHeap()  # by place
        self._deadlines = KeyedHeap()  # by time
        self._slots = list(range(max_num_seqs))  # a heap
        self.num_waiting_tokens = 0  # prompt tokens of those that wait

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> Record | None:
        return self._live.get(request_id)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> tuple[Record, ...]:
        """Those that run, oldest first; a copy, so they may be moved while it is walked through."""
        return tuple(self._running)

    def youngest(self) -> Iterator[Record]:
        """Those that run, youngest first."""
        return reversed(self._running)

    def first_waiting(self) -> Record | None:
        """Who is next in the queue."""
        first = self._waiting.first()
        return None if first is None else self._live[first[1]]

    def first_few_waiting(self, count: int) -> list[Record]:
        """The first `count` of the queue, in its order."""
        return [self._live[name] for name in self._waiting.first_few(count)]

    def first_due(self, now: float) -> Record | None:
        """A record whose deadline has passed."""
        first = self._deadlines.first()
        return None if first is None or first[0] > now else self._live[first[1]]

    def enter(self, record: Record, deadline: float) -> None:
        """A new record, waiting."""
        self._live[record.request_id] = record
        self.set_deadline(record, deadline)
        self._queue(record)

    def set_deadline(self, record: Record, deadline: float) -> None:
        self._deadlines.push(record.request_id, deadline)

    def seat(self, record: Record) -> None:
        """From waiting to running: a residency begins."""
        self._unqueue(record)
        record.status = SequenceStatus.RUNNING
        record.slot = heapq.heappop(self._slots)
        record.is_fresh = True
        record.num_generated_before = record.num_generated
        bisect.insort(self._running, record, key=_by_order)

    def unseat(self, record: Record) -> None:
        """From running to waiting, in its old place in the order. Its pages have been taken back."""
        self._free_slot(record)
        self._queue(record)

    def leave(self, record: Record) -> None:
        """The record has ended."""
        if record.status is SequenceStatus.RUNNING:
            self._free_slot(record)
        else:
            self._unqueue(record)
        record.status = SequenceStatus.FINISHED
        self._deadlines.discard(record.request_id)
        del self._live[record.request_id]

    def reorder(self, order: Callable[[Request, int], Order], place: Callable[[Request, int], Order]) -> None:
        """Give every record its order and its place in the queue by new rules, called as the records came."""
        for record in self._live.values():
            number = record.order[2]
            record.order, record.place = order(record.request, number), place(record.request, number)
            if record.status is SequenceStatus.WAITING:
                self._waiting.push(record.request_id, record.place)
        self._running.sort(key=_by_order)

    def _free_slot(self, record: Record) -> None:
        self._running.remove(record)
        heapq.heappush(self._slots, record.slot)
        record.slot = -1

    def _queue(self, record: Record) -> None:
        record.status = SequenceStatus.WAITING
        self._waiting.push(record.request_id, record.place)
        self.num_waiting_tokens += len(record.request.prompt_token_ids)

    def _unqueue(self, record: Record) -> None:
        self._waiting.discard(record.request_id)
        self.num_waiting_tokens -= len(record.request.prompt_token_ids)

    def check_integrity(self) -> None:
        """Every live record is in one place, and what it holds fits that place."""
        slots = [record.slot for record in self._running]
        assert sorted(slots + self._slots) == list(range(self._max_num_seqs)), "a slot is lost or taken twice"
        assert self._running == sorted(self._running, key=_by_order), "running is out of order"
        assert len(self._live) == len(self._running) + len(self._waiting), "a live record is nowhere"
        tokens = 0
        for name, record in self._live.items():
            waits = name in self._waiting
            assert waits == (record.status is SequenceStatus.WAITING), f"{name} has the wrong status"
            assert waits == (record.slot < 0), f"{name} has the wrong slot {record.slot}"
            assert not (waits and record.pages), f"{name} waits and holds pages"
            assert record.num_pending >= 0, f"{name} has {record.num_pending} pending tokens"
            assert name in self._deadlines, f"{name} has no deadline"
            tokens += len(record.request.prompt_token_ids) if waits else 0
        assert tokens == self.num_waiting_tokens, "waiting tokens are miscounted"
