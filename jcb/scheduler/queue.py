"""Which of those that wait is let in next, by policy."""

from __future__ import annotations

from jcb.config import SchedulingPolicy
from jcb.scheduler import policy
from jcb.scheduler.pages import PageLedger
from jcb.scheduler.record import Order, Record
from jcb.scheduler.roster import Roster
from jcb.scheduler.shares import Shares
from jcb.types import Request


class Queue:
    """The policy's choices and what it has to remember for them. The records themselves wait in the roster."""

    def __init__(self, name: SchedulingPolicy) -> None:
        self._name = name
        self._shares = Shares()

    def order(self, request: Request, number: int) -> Order:
        """The request's precedence among those that run."""
        return policy.precedence(self._name, request, number)

    def place(self, request: Request, number: int) -> Order:
        """Where a request waits; call it once for each, as they came."""
        return policy.place(self._name, request, number, self._shares)

    def next(self, roster: Roster, pages: PageLedger) -> Record | None:
        """Who is let in next. Of the first few the one whose prompt is cached furthest, where the policy says so and
        the first was not passed over too often.
        """
        first = roster.first_waiting()
        if self._name != "longest-prefix" or first is None or first.num_passed >= policy.MOST_PASSES:
            return first
        few = roster.first_few_waiting(policy.PREFIX_WINDOW)
        return max(few, key=lambda record: len(pages.match(pages.keys(record))))

    def admit(self, record: Record, roster: Roster) -> None:
        """Note that the record is let in; it still waits in the roster."""
        first = roster.first_waiting()
        assert first is not None
        first.num_passed += record is not first
        if self._name == "fair-share" and not record.was_scheduled:
            self._shares.begin(record.place[1])

    def end(self, record: Record) -> None:
        """Note that the record has ended."""
        if self._name == "fair-share":
            self._shares.charge(record.request.namespace, len(record.output_token_ids))
