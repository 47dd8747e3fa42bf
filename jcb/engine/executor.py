"""The one module where plans meet the device: plan → packed array → step program → result.

`dispatch` returns at once (JAX runs asynchronously), `collect` waits. Host arrays handed to the device are fresh each
step and never changed afterwards: on CPU they may be the device's own buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jcb.config import Limits
from jcb.metrics import EngineMetrics
from jcb.steps import mask, outputs, pick, prompt, slot
from jcb.steps.compile_guard import CompileGuard
from jcb.steps.packer import Packer
from jcb.steps.registry import Registry, name_of
from jcb.types import RowKind, StepPlan, StepResult


@dataclass(frozen=True)
class Handle:
    """A step on its way: its plan, and arrays that will hold its outputs."""

    plan: StepPlan
    packed: jax.Array  # i32[R, outputs.WIDTH]
    prompt: jax.Array | None  # i32[lines, prompt.WIDTH] where some row wants prompt log-probabilities


class DeviceExecutor:
    """Runs plans on the device. Owns the device state; the params are never changed."""

    def __init__(
        self,
        registry: Registry,
        params: Any,
        limits: Limits,
        max_num_seqs: int,
        guard: CompileGuard | None = None,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.registry = registry
        self._metrics = metrics or EngineMetrics()
        self.guard = guard or CompileGuard()
        self._params = params
        self._limits = limits
        self._num_slots = max_num_seqs
        self._packer = Packer(limits, max_num_seqs)
        self._state = registry.init_state()
        shape = self._state.kv_pages.shape
        if shape[1] != limits.num_pages:
            raise ValueError(f"the cache array has {shape[1]} pages, the scheduler believes in {limits.num_pages}")

    def warm_up(self) -> None:
        """Run one empty step, so that first-use costs are paid, and arm the compile guard."""
        shape = self.registry.shapes.decode[0]
        packed = self._packer.pack(StepPlan(0, ()), shape)
        self._state, outputs_array, _ = self.registry.step(shape)(self._params, self._state, packed)
        np.asarray(outputs_array)
        self.guard.arm()

    def dispatch(self, plan: StepPlan) -> Handle:
        """Start `plan` on the device. Raises ValueError for ids out of range, before anything is dispatched."""
        shape = self.registry.shapes.choose(plan)
        packed = self._packer.pack(plan, shape)
        for row in plan.rows:
            if row.kind is not RowKind.CONTINUED and slot.needs_slot(row.sequence.request):
                content = slot.pack(row.sequence, self._limits.vocab_size, self._limits.max_model_len)
                self._state = self.registry.load_slot(self._state, content)
        for content in mask.pack(plan, self._limits.vocab_size, self._num_slots):
            self._state = self.registry.load_masks(self._state, content)
        records = pick.split(packed, shape)
        self._state, packed_outputs, logits = self.registry.step(shape)(self._params, self._state, packed)
        if records is not None:
            self._state, packed_outputs = self.registry.pick(shape.num_rows)(logits, self._state, records)
        packed_outputs.copy_to_host_async()
        self._metrics.record_bucket(name_of(shape), plan.num_tokens, shape.num_tokens)
        return Handle(plan, packed_outputs, None if shape.decode else self._dispatch_prompt(plan))

    def _dispatch_prompt(self, plan: StepPlan) -> jax.Array | None:
        """Start the prompt program where some row of the step just started asks for it."""
        packed = prompt.pack(plan, self.registry.max_tokens)
        if packed is None:
            return None
        self._state, lines = self.registry.prompt(self._params, self._state, packed)
        return lines

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a dispatched step and read its outputs."""
        plan = handle.plan
        found = {} if handle.prompt is None else prompt.unpack(plan, np.asarray(handle.prompt))
        return outputs.unpack(plan, np.asarray(handle.packed), found)

    def reset(self) -> None:
        """Forget everything on the device: called after a failed step, whose donated state is lost."""
        self._state = self.registry.init_state()

    @property
    def cache_pointer(self) -> int:
        """Address of the cache array on the first device; steps must not change it (CPU and GPU)."""
        return self._state.kv_pages.addressable_shards[0].data.unsafe_buffer_pointer()
