"""Every program that may ever run, named in one place; warm-up compiles exactly these.

A step program is (prefill or decode, tokens, rows), see `jcb.steps.shapes`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jcb.config import Limits, SchedulerConfig
from jcb.models import llama
from jcb.models.params import abstract, partition_specs
from jcb.sharding import Placement
from jcb.steps import mask, pick, prompt, slot
from jcb.steps.compiler_options import COMPILER_OPTIONS
from jcb.steps.inputs import packed_size
from jcb.steps.lowered import LoweredCache
from jcb.steps.shapes import Shapes, StepShape
from jcb.steps.state import DeviceState, init_state, state_specs
from jcb.steps.step import StepStatics, decode_step, prefill_step

_COMPILE_STACK_BYTES = 64 << 20  # lowering deep programs overflows the usual 8 MiB


@dataclass(frozen=True)
class Program:
    """One compiled program and what its compiler says of it (bytes)."""

    name: str
    call: Any  # the compiled program itself
    seconds: float
    argument_bytes: int
    alias_bytes: int
    output_bytes: int  # those in place included
    temp_bytes: int


class Registry:
    """The compiled programs of one engine: a step for each shape and what goes with them, the first state too.

    statics: of the whole model, whatever `placement` makes of it. kept: lowered steps of earlier starts, for one CPU
    device only.
    """

    def __init__(
        self,
        statics: StepStatics,
        scheduler: SchedulerConfig,
        limits: Limits,
        dtype: str,
        placement: Placement = Placement(),  # noqa: B008 (frozen)
        kept: LoweredCache | None = None,
    ) -> None:
        self.shapes = Shapes.make(scheduler, limits)
        self.programs: dict[Any, Program] = {}
        self._limits = limits
        self._placement = placement
        self._kept = kept
        self._options = COMPILER_OPTIONS.get(statics.layout.platform)
        specs, slots = llama.param_specs(statics.config), scheduler.max_num_seqs
        self._param_specs = partition_specs(specs, placement)
        self._params = placement.abstract(abstract(specs, jnp.dtype(dtype)), self._param_specs)
        self.max_tokens = max(shape.num_tokens for shape in self.shapes.prefill)
        hidden = jax.ShapeDtypeStruct((self.max_tokens, statics.config.hidden_size), jnp.dtype(dtype))
        sizes = (statics.config.num_layers, limits.num_pages, slots, limits.vocab_size, hidden)
        make = partial(init_state, statics.layout, *sizes)
        self._state_specs = state_specs(jax.eval_shape(make), placement)
        self._state = placement.abstract(jax.eval_shape(make), self._state_specs)
        shardings = placement.shardings(self._state_specs)
        self._todo: dict[Any, Callable[[], Any]] = {"init": lambda: jax.jit(make, out_shardings=shardings).lower()}
        self._todo["slot"] = self._lower_slot
        self._todo["mask"] = self._lower_mask
        local = statics.split(placement)
        self._todo["prompt"] = partial(self._lower_prompt, local)
        for rows in self.shapes.row_counts:
            self._todo[f"pick {rows}"] = partial(self._lower_pick, rows)
        for shape in (*self.shapes.decode, *self.shapes.prefill):
            self._todo[shape] = partial(self._lower_step, local, shape)

    def __len__(self) -> int:
        return len(self._todo)

    @property
    def keys(self) -> tuple[Any, ...]:
        """What there is to compile: "init", "slot", "mask", "prompt", "pick" of so many rows, every step shape."""
        return tuple(self._todo)

    def compile(self, key: Any, options: Mapping[str, Any] | None = None) -> Program:
        """Compile one program now, from any thread. options: of the compiler, beside what the platform needs."""
        return _compile(key, self._todo[key], {**(self._options or {}), **(options or {})} or None)

    def compile_all(self, progress: Callable[[str, int, int], None] | None = None, threads: int = 2) -> None:
        """Compile what is not compiled yet, several at a time; `progress("compile", done, total)` after each."""
        lock = threading.Lock()

        def build(key: Any) -> None:
            program = self.compile(key)
            with lock:
                self.programs[key] = program
                if progress is not None:
                    progress("compile", len(self.programs), len(self._todo))

        with compile_threads(threads) as pool:
            # The long ones first, so that no thread begins one when the others are done.
            list(pool.map(build, [key for key in reversed(self._todo) if key not in self.programs]))

    def step(self, shape: StepShape) -> Callable[..., Any]:
        """The program (params, state, packed) → state, outputs, logits of `shape`."""
        return self.programs[shape].call

    def pick(self, num_rows: int) -> Callable[..., Any]:
        """The program (logits, state, packed) → state, outputs that follows a step whose rows want more."""
        return self.programs[f"pick {num_rows}"].call

    @property
    def prompt(self) -> Callable[..., Any]:
        """The program (params, state, packed) → state, outputs that follows a step with prompt log-probabilities."""
        return self.programs["prompt"].call

    def init_state(self) -> DeviceState:
        """A zeroed state, allocated on the device."""
        return self.programs["init"].call()

    def load_slot(self, state: DeviceState, packed: np.ndarray) -> DeviceState:
        """Run the slot program; `state` is consumed."""
        return self.programs["slot"].call(state, packed)

    def load_masks(self, state: DeviceState, packed: np.ndarray) -> DeviceState:
        """Run the mask program; `state` is consumed."""
        return self.programs["mask"].call(state, packed)

    @property
    def temp_bytes(self) -> int:
        """Temporaries and new outputs of the hungriest program that runs while there is a state; of a pick program
        the logits too, which a step has left.
        """

        def beside(key: Any, program: Program) -> int:
            logits = program.argument_bytes - program.alias_bytes if str(key).startswith("pick ") else 0
            return program.temp_bytes + program.output_bytes - program.alias_bytes + logits

        return max(beside(key, program) for key, program in self.programs.items() if key != "init")

    def _lower_step(self, statics: StepStatics, shape: StepShape) -> Any:
        step = decode_step if shape.decode else prefill_step
        bound = partial(step, statics, shape)
        return self._lower(step.__name__, (statics, shape), bound, self._param_arguments, packed_size(shape), 2)

    def _lower_prompt(self, statics: StepStatics) -> Any:
        step = partial(prompt.prompt_step, statics)
        return self._lower("prompt_step", (statics,), step, self._param_arguments, prompt.packed_size(self.max_tokens))

    def _lower_pick(self, num_rows: int) -> Any:
        logits = jax.ShapeDtypeStruct((num_rows, self._limits.vocab_size), jnp.float32)
        first = (self._placement.abstract(logits, PartitionSpec()), PartitionSpec())
        step = partial(pick.pick_step)  # an object of its own, for `_lower` names what it is given
        return self._lower("pick_step", (), step, first, pick.packed_size(num_rows))

    @property
    def _param_arguments(self) -> tuple[Any, Any]:
        return self._params, self._param_specs

    def _lower(
        self, name: str, facts: Any, function: Callable[..., Any], first: tuple[Any, Any], size: int, count: int = 1
    ) -> Any:
        """A function (first, state, packed) → (state, `count` arrays).

        facts: all that it depends on beside its sources. first: the argument and how it is split.
        """
        whole = PartitionSpec()
        specs = (first[1], self._state_specs, whole)
        split: Any = self._placement.wrap(function, specs, (self._state_specs, *[whole] * count))
        split.__name__ = name
        arguments = (first[0], self._state, self._packed(size))
        if self._kept is not None:
            return self._kept.lower(repr(facts), split, arguments)
        return jax.jit(split, donate_argnums=1).lower(*arguments)

    def _lower_slot(self) -> Any:
        return self._lower_load(slot.load_slot, slot.packed_size(self._limits.vocab_size, self._limits.max_model_len))

    def _lower_mask(self) -> Any:
        return self._lower_load(mask.load_masks, mask.packed_size(self._limits.vocab_size))

    def _lower_load(self, function: Callable[..., DeviceState], size: int) -> Any:
        out = self._placement.shardings(self._state_specs)
        return jax.jit(function, donate_argnums=0, out_shardings=out).lower(self._state, self._packed(size))

    def _packed(self, size: int) -> Any:
        return self._placement.abstract(jax.ShapeDtypeStruct((size,), jnp.int32), PartitionSpec())


@contextlib.contextmanager
def compile_threads(count: int) -> Generator[ThreadPoolExecutor]:
    """A pool whose threads have stacks deep enough for the compilers."""
    previous = threading.stack_size(_COMPILE_STACK_BYTES)
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="compile") as pool:
            yield pool
    finally:
        threading.stack_size(previous)


def name_of(key: Any) -> str:
    """A readable name of a registry key, such as "prefill 512 x 64"."""
    return key.name if isinstance(key, StepShape) else str(key)


def _compile(key: Any, lower: Callable[[], Any], options: dict[str, Any] | None) -> Program:
    start = time.perf_counter()
    compiled = lower().compile(compiler_options=options)
    memory = compiled.memory_analysis()
    return Program(
        name=name_of(key),
        call=compiled,
        seconds=time.perf_counter() - start,
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )
