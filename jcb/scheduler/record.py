"""What the scheduler remembers of one sequence beside the facts that others may read."""

from __future__ import annotations

from dataclasses import dataclass, field

from jcb.types import Matcher, RowKind, Sequence

Order = tuple[int, float, int]
"""Precedence, smallest first: priority, arrival or what the policy takes for it, number of the request."""


@dataclass(slots=True, eq=False)
class Record(Sequence):
    """A sequence with the scheduler's own bookkeeping.

    A residency is the time between getting a slot and losing it; fields marked so start anew with each.
    """

    order: Order = (0, 0.0, 0)
    place: Order = (0, 0.0, 0)  # in the queue
    num_passed: int = 0  # times it was passed over as first of the queue
    limit: int = 0  # most tokens it may generate
    stop_ids: frozenset[int] = frozenset()
    digests: list[bytes] = field(default_factory=list)  # prefix-cache keys of its first full pages
    num_published: int = 0  # residency: leading pages offered to the prefix cache
    page_table: tuple[int, ...] = ()  # residency: the last planned row's pages, reused while they do not change
    is_fresh: bool = True  # residency: no row planned yet
    num_generated_before: int = 0  # residency: tokens generated when it began
    has_yielded: bool = False  # it has waited a step for pages that another was filling
    num_prompt_logprobs: int = 0  # prompt positions whose log-probabilities were delivered
    matcher: Matcher | None = None  # has taken in its output tokens; None when it follows no grammar
    must_prove: int = 0  # length it has to reach alone after having been in a failed step

    @property
    def kind(self) -> RowKind:
        """What its next row is."""
        if not self.is_fresh:
            return RowKind.CONTINUED
        return RowKind.RESUMED if self.was_scheduled else RowKind.NEW
