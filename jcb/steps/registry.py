"""Every program that may ever run, named in one place; warm-up compiles exactly these.

A step program is (prefill or decode, tokens, rows). Ladders end at the configured budget, so every legal plan fits.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcb.config import Limits, SchedulerConfig
from jcb.models import llama
from jcb.models.params import abstract
from jcb.steps import slot
from jcb.steps.inputs import StepShape
from jcb.steps.state import DeviceState, abstract_state, init_state
from jcb.steps.step import StepStatics, decode_step, prefill_step
from jcb.types import StepPlan

SMALLEST_ROWS = 2
"""One-row programs are never built: on CPU a matmul of one row is slower than of two."""

SMALLEST_TOKENS = 16
_COMPILE_STACK_BYTES = 64 << 20  # lowering deep programs overflows the usual 8 MiB


def row_ladder(top: int) -> tuple[int, ...]:
    """Row buckets of decode programs: 2, 8, 16, 32 … and `top` itself."""
    steps = [SMALLEST_ROWS] + [8 << i for i in range(32)]
    return (*[rows for rows in steps if rows < top], max(top, SMALLEST_ROWS))


def mixed_row_ladder(top: int) -> tuple[int, ...]:
    """Row buckets of prefill programs: every other power of two, since each multiplies the token buckets."""
    return (*[8 << 2 * i for i in range(16) if 8 << 2 * i < top], max(top, SMALLEST_ROWS))


def token_ladder(top: int) -> tuple[int, ...]:
    """Token buckets of prefill programs: powers of two from 16, and `top` itself."""
    return (*[SMALLEST_TOKENS << i for i in range(24) if SMALLEST_TOKENS << i < top], top)


@dataclass(frozen=True)
class Program:
    """One compiled program and what its compiler says of it (bytes)."""

    name: str
    call: Callable[..., Any]
    seconds: float
    argument_bytes: int
    alias_bytes: int
    temp_bytes: int


@dataclass(frozen=True)
class Shapes:
    """The closed set of step shapes, and the one each plan uses."""

    decode: tuple[StepShape, ...]
    prefill: tuple[StepShape, ...]

    @staticmethod
    def make(scheduler: SchedulerConfig, limits: Limits) -> Shapes:
        """Shapes for every plan that `scheduler` can make."""
        width = limits.pages_per_seq
        decode = tuple(StepShape(r, r, width, True) for r in row_ladder(scheduler.max_num_seqs))
        prefill = tuple(
            StepShape(tokens, rows, width, False)
            for rows in mixed_row_ladder(scheduler.max_num_seqs)
            for tokens in token_ladder(max(scheduler.max_num_batched_tokens, SMALLEST_ROWS))
            if tokens >= min(rows, scheduler.max_num_batched_tokens)
        )
        return Shapes(decode, prefill)

    def choose(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds `plan`. Raises LookupError when none does."""
        rows, tokens = len(plan.rows), plan.num_tokens
        if tokens == rows and not any(row.wants_prompt_logprobs for row in plan.rows):
            index = bisect.bisect_left(self.decode, rows, key=lambda shape: shape.num_rows)
            if index < len(self.decode):
                return self.decode[index]
        for shape in self.prefill:
            if shape.num_rows >= rows and shape.num_tokens >= tokens:
                return shape
        raise LookupError(f"no program holds {rows} rows with {tokens} tokens")


class Registry:
    """The compiled programs of one engine: one per step shape, the slot program, and the initial state."""

    def __init__(self, statics: StepStatics, scheduler: SchedulerConfig, limits: Limits, dtype: str) -> None:
        self.shapes = Shapes.make(scheduler, limits)
        self._limits = limits
        config, slots = statics.config, scheduler.max_num_seqs
        state = (statics.layout, config.num_layers, limits.num_pages, slots, limits.vocab_size)
        self._params = abstract(llama.param_specs(config), jnp.dtype(dtype))
        self._state = abstract_state(*state)
        self._todo: dict[Any, Callable[[], Any]] = {"init": lambda: jax.jit(lambda: init_state(*state)).lower()}
        self._todo["slot"] = self._lower_slot
        for shape in (*self.shapes.decode, *self.shapes.prefill):
            self._todo[shape] = partial(self._lower_step, statics, shape)
        self.programs: dict[Any, Program] = {}

    def __len__(self) -> int:
        return len(self._todo)

    def compile_all(self, progress: Callable[[str, int, int], None] | None = None, threads: int = 2) -> None:
        """Compile what is not compiled yet, several at a time; `progress("compile", done, total)` after each."""
        lock, previous = threading.Lock(), threading.stack_size(_COMPILE_STACK_BYTES)

        def build(key: Any) -> None:
            program = _compile(key, self._todo[key])
            with lock:
                self.programs[key] = program
                if progress is not None:
                    progress("compile", len(self.programs), len(self._todo))

        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
                list(pool.map(build, [key for key in self._todo if key not in self.programs]))
        finally:
            threading.stack_size(previous)

    def step(self, shape: StepShape) -> Callable[..., Any]:
        """The program (params, state, packed) → outputs of `shape`."""
        return self.programs[shape].call

    def init_state(self) -> DeviceState:
        """A zeroed state, allocated on the device."""
        return self.programs["init"].call()

    def load_slot(self, state: DeviceState, packed: np.ndarray) -> DeviceState:
        """Run the slot program; `state` is consumed."""
        return self.programs["slot"].call(state, packed)

    @property
    def temp_bytes(self) -> int:
        """Temporaries of the hungriest program."""
        return max(program.temp_bytes for program in self.programs.values())

    def _lower_step(self, statics: StepStatics, shape: StepShape) -> Any:
        function = decode_step if shape.decode else prefill_step
        packed = jax.ShapeDtypeStruct((shape.packed_size,), jnp.int32)
        step = jax.jit(partial(function, statics, shape), donate_argnums=1)
        return step.lower(self._params, self._state, packed)

    def _lower_slot(self) -> Any:
        size = slot.packed_size(self._limits.vocab_size, self._limits.max_model_len)
        packed = jax.ShapeDtypeStruct((size,), jnp.int32)
        return jax.jit(slot.load_slot, donate_argnums=0).lower(self._state, packed)


def name_of(key: Any) -> str:
    """A readable name of a registry key, such as "prefill 512 x 64"."""
    if isinstance(key, StepShape):
        return f"decode {key.num_rows}" if key.decode else f"prefill {key.num_tokens} x {key.num_rows}"
    return str(key)


def _compile(key: Any, lower: Callable[[], Any]) -> Program:
    start = time.perf_counter()
    compiled = lower().compile()
    memory = compiled.memory_analysis()
    return Program(
        name=name_of(key),
        call=compiled,
        seconds=time.perf_counter() - start,
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )
