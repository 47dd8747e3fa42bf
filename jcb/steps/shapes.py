"""The closed set of step shapes, and the one that each plan uses.

Host half, unlike its neighbours: plain Python, so that the simulator and the planner count the very padding that the
device computes. Ladders reach the configured budget, so every legal plan fits.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property

from jcb.config import Limits, SchedulerConfig
from jcb.types import StepPlan

SMALLEST_ROWS = 2
"""One-row programs are never built: on CPU a matmul of one row is slower than of two."""

SMALLEST_TOKENS = 16


@dataclass(frozen=True)
class StepShape:
    """The static shape of a step program: T tokens in R rows; a decode step has one token a row."""

    num_tokens: int
    num_rows: int
    pages_per_seq: int
    decode: bool

    @property
    def name(self) -> str:
        """Such as "prefill 512 x 64"."""
        return f"decode {self.num_rows}" if self.decode else f"prefill {self.num_tokens} x {self.num_rows}"


FINE_FROM = 64
"""From here on a fine ladder has 96, 192, 384 … too: each step is about a square root of two."""


def row_ladder(top: int, *, fine: bool = False) -> tuple[int, ...]:
    """Row buckets of decode programs: 2, 8, 16, 32 … and `top` itself."""
    return (*[rows for rows in (SMALLEST_ROWS, *_powers(8, fine)) if rows < top], max(top, SMALLEST_ROWS))


def mixed_row_ladder(top: int, *, fine: bool = False) -> tuple[int, ...]:
    """Row buckets of prefill programs: every other power of two, since each multiplies the token buckets.

    fine: from 16 instead of 8 on: its many token buckets are paid for here.
    """
    first = 16 if fine else 8
    return (*[first << 2 * i for i in range(16) if first << 2 * i < top], max(top, SMALLEST_ROWS))


def token_ladder(top: int, *, fine: bool = False) -> tuple[int, ...]:
    """Token buckets of prefill programs: powers of two from 16, and `top` itself."""
    return (*[tokens for tokens in _powers(SMALLEST_TOKENS, fine) if tokens < top], top)


def _powers(first: int, fine: bool) -> list[int]:
    """first, 2 * first, 4 * first …; with `fine`, half as much again of each from FINE_FROM on."""
    doubled = [first << i for i in range(28)]
    return sorted([*doubled, *(3 * size // 2 for size in doubled if fine and size >= FINE_FROM)])


@dataclass(frozen=True)
class Shapes:
    """Every step shape of an engine."""

    decode: tuple[StepShape, ...]
    prefill: tuple[StepShape, ...]

    @staticmethod
    def make(scheduler: SchedulerConfig, limits: Limits) -> Shapes:
        """Shapes for every plan that `scheduler` can make: of the buckets it names, else of the usual ladders."""
        width, budget = limits.pages_per_seq, scheduler.max_num_batched_tokens
        fine = scheduler.bucket_ladder == "fine"
        rows_alone = scheduler.decode_row_buckets or row_ladder(scheduler.max_num_seqs, fine=fine)
        rows_mixed = scheduler.prefill_row_buckets or mixed_row_ladder(scheduler.max_num_seqs, fine=fine)
        tokens_mixed = scheduler.token_buckets or token_ladder(max(budget, SMALLEST_ROWS), fine=fine)
        decode = tuple(StepShape(rows, rows, width, True) for rows in rows_alone)
        prefill = tuple(
            StepShape(tokens, rows, width, False)
            for rows in rows_mixed
            for tokens in tokens_mixed
            if scheduler.token_buckets or tokens >= min(rows, budget)
        )
        return Shapes(decode, prefill)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The numbers of rows that steps have, each once."""
        return tuple(sorted({shape.num_rows for shape in (*self.decode, *self.prefill)}))

    @cached_property
    def _decode_rows(self) -> tuple[int, ...]:
        return tuple(shape.num_rows for shape in self.decode)

    def choose(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds `plan`. Raises LookupError when none does."""
        rows, tokens = len(plan.rows), plan.num_tokens
        only_decodes = tokens == rows and not any(row.wants_prompt_logprobs for row in plan.rows)
        return self.fit(tokens, rows, only_decodes=only_decodes)

    def fit(self, tokens: int, rows: int, *, only_decodes: bool) -> StepShape:
        """The smallest shape for so many tokens in so many rows. Raises LookupError when there is none."""
        if only_decodes:
            index = bisect.bisect_left(self._decode_rows, rows)
            if index < len(self.decode):
                return self.decode[index]
        for shape in self.prefill:
            if shape.num_rows >= rows and shape.num_tokens >= tokens:
                return shape
        raise LookupError(f"no program holds {rows} rows with {tokens} tokens")
