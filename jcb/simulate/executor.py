"""An executor whose device is a cost function: plans take virtual seconds and yield made-up tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jcb.simulate.clock import VirtualClock
from jcb.simulate.cost import NO_HOST, HostCost, StepCost
from jcb.types import MAX_LOGPROBS, RowKind, ScheduledRow, StepPlan, StepResult

TokenRule = Callable[[ScheduledRow], int]
"""The token that a row samples."""


def affine_cost(*, step: float, token: float) -> StepCost:
    """A fixed price a step and one for each of its tokens: the simplest model with a gain from batching."""
    return lambda plan: step + token * plan.num_tokens


class HashedTokens:
    """A token is a hash of the prompt and its position, so it is the same however the prompt was scheduled."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._prompts: dict[int, int] = {}  # hash by slot

    def __call__(self, row: ScheduledRow) -> int:
        if row.kind is not RowKind.CONTINUED:
            self._prompts[row.slot] = hash(row.sequence.request.prompt_token_ids)
        return hash((self._prompts[row.slot], row.kv_len)) % self._vocab_size


class SimHandle(NamedTuple):
    """A plan on the pretended device: what it yields, and when."""

    result: StepResult
    done_at: float
    rows: int


class SimExecutor:
    """Runs plans one after another on a `VirtualClock`, never faster than `cost` says.

    host: what the engine's thread takes around a step; it passes here, so that it overlaps with the device as it does
    in the engine. tokens: which token a row samples, a hash where none is given.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cost: StepCost,
        *,
        vocab_size: int,
        host: HostCost = NO_HOST,
        tokens: TokenRule | None = None,
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._host = host
        self._tokens = tokens or HashedTokens(vocab_size)
        self._blanks: dict[int, StepResult] = {}  # by number of rows
        self._free_at = clock()
        self.busy_seconds = 0.0

    def reset(self) -> None:
        """What was in flight is void; the clock goes on."""
        self._free_at = self._clock()

    def dispatch(self, plan: StepPlan) -> SimHandle:
        """Queue the plan behind those dispatched before it."""
        rows = len(plan.rows)
        self._clock.advance(self._host.before(rows))
        seconds = self._cost(plan)
        self._free_at = max(self._free_at, self._clock()) + seconds
        self.busy_seconds += seconds
        self._clock.advance(self._host.dispatch(rows))
        return SimHandle(self._result(plan), self._free_at, rows)

    def collect(self, handle: SimHandle) -> StepResult:
        """Wait for the plan's end on the virtual clock."""
        self._clock.advance_to(handle.done_at)
        self._clock.advance(self._host.after(handle.rows))
        return handle.result

    def _result(self, plan: StepPlan) -> StepResult:
        tokens = np.array([*map(self._tokens, plan.rows)], np.int32)
        size = len(plan.rows)
        if size not in self._blanks:
            self._blanks[size] = _blank(size)
        blank = self._blanks[size]
        return StepResult(plan.step_id, tokens, blank.logprobs, blank.top_ids, blank.top_logprobs, blank.finite)


def _blank(size: int) -> StepResult:
    """What is the same in every result of `size` rows."""
    return StepResult(
        0,
        np.zeros(size, np.int32),
        np.zeros(size, np.float32),
        np.zeros((size, MAX_LOGPROBS), np.int32),
        np.zeros((size, MAX_LOGPROBS), np.float32),
        np.ones(size, np.bool_),
    )
