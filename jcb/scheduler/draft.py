"""A step while it is being decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from jcb.scheduler.record import Record


@dataclass(slots=True)
class Draft:
    """Who runs how many tokens so far. Nothing in it has changed a record's progress yet, so a row can be taken
    out again when an older sequence needs its pages.
    """

    budget: int  # tokens still to be given out
    rows: dict[Record, int] = field(default_factory=dict)
    extra: dict[Record, int] = field(default_factory=dict)  # of the budget, beside the row's tokens
    preempted: list[str] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)  # prefix-cache keys of pages that prompts are filling
    promised: int = 0  # pages that running prompts still need beyond those they hold

    def add(self, record: Record, q_len: int, charge: int = 0) -> None:
        """charge: what the row takes of the budget, where that is more than its tokens."""
        self.rows[record] = q_len
        self.budget -= q_len
        if charge > q_len:
            self.extra[record] = charge - q_len
            self.budget -= charge - q_len

    def withdraw(self, record: Record) -> None:
        """Take the record's row out, if it has one."""
        self.budget += self.rows.pop(record, 0) + self.extra.pop(record, 0)
