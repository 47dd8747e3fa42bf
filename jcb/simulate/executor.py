"""An executor whose device is a cost function: plans take virtual seconds and yield made-up tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jcb.simulate.clock import VirtualClock
from jcb.types import MAX_LOGPROBS, RowKind, ScheduledRow, StepPlan, StepResult

StepCost = Callable[[StepPlan], float]
"""Seconds that a plan takes on the device."""


def affine_cost(*, step: float, token: float) -> StepCost:
    """A fixed price a step and one for each of its tokens: the simplest model with a gain from batching."""
    return lambda plan: step + token * plan.num_tokens


@dataclass(frozen=True, slots=True)
class SimHandle:
    """A plan on the pretended device: what it yields, and when."""

    result: StepResult
    done_at: float


class SimExecutor:
    """Runs plans one after another on a `VirtualClock`, never faster than `cost` says.

    A token is a hash of the prompt and its position, so it is the same however the prompt was scheduled.
    """

    def __init__(self, clock: VirtualClock, cost: StepCost, *, vocab_size: int) -> None:
        self._clock = clock
        self._cost = cost
        self._vocab_size = vocab_size
        self.reset()
        self.busy_seconds = 0.0

    def reset(self) -> None:
        """Forget what the slots hold; the clock goes on."""
        self._free_at = self._clock()
        self._prompt_hashes: dict[int, int] = {}  # by slot

    def dispatch(self, plan: StepPlan) -> SimHandle:
        """Queue the plan behind those dispatched before it."""
        seconds = self._cost(plan)
        self._free_at = max(self._free_at, self._clock()) + seconds
        self.busy_seconds += seconds
        return SimHandle(self._result(plan), self._free_at)

    def collect(self, handle: SimHandle) -> StepResult:
        """Wait for the plan's end on the virtual clock."""
        self._clock.advance_to(handle.done_at)
        return handle.result

    def _result(self, plan: StepPlan) -> StepResult:
        size = len(plan.rows)
        return StepResult(
            plan.step_id,
            np.array([self._token(row) for row in plan.rows], np.int32),
            np.zeros(size, np.float32),
            np.zeros((size, MAX_LOGPROBS), np.int32),
            np.zeros((size, MAX_LOGPROBS), np.float32),
            np.ones(size, np.bool_),
        )

    def _token(self, row: ScheduledRow) -> int:
        if row.kind is not RowKind.CONTINUED:
            self._prompt_hashes[row.slot] = hash(row.sequence.request.prompt_token_ids)
        return hash((self._prompt_hashes[row.slot], row.kv_len)) % self._vocab_size
