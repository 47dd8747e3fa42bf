"""One run on a rented chip, at most five minutes: are the kernels right there, and how close to its floor?

    python -m jcb.bench.chip_check [--json FILE]

1. every named case of attention and kv_write against the reference;
2. attention's time on shapes of Llama-3.1-8B, beside XLA's path and cuDNN's over keys that lie in one piece;
3. the whole decode step of Llama-3.1-8B with random weights at 1, 8, 64, 256 rows of 2,048 tokens.

Needs no more than jax, numpy and flax, and no model file. Where there is no accelerator it runs on small shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jcb.bench import kernels
from jcb.bench.roofline import Roofline, all_seconds, measure_roofline
from jcb.config import Limits, ModelConfig, SchedulerConfig
from jcb.models import llama
from jcb.models.params import init
from jcb.models.presets import PRESETS
from jcb.models.specs import nbytes
from jcb.steps.packer import Packer
from jcb.steps.registry import Registry
from jcb.steps.step import StepStatics
from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan
from pallas_kernels import kv_write as write_op
from pallas_kernels import paged_attention as attention_op
from pallas_kernels.kv_write import cases as write_cases
from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention import cases as attention_cases

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CONTEXT = 2048
STEPS = 20
TINY = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=2, vocab_size=512)


def main(arguments: list[str] | None = None) -> int:
    """Print the three tables; status 1 when a case is wrong."""
    parser = argparse.ArgumentParser(prog="python -m jcb.bench.chip_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    flags = parser.parse_args(arguments)
    started, real = time.perf_counter(), jax.default_backend() != "cpu"
    roofline = measure_roofline("bfloat16" if real else "float32")
    print(
        f"{roofline.device}, jax {jax.__version__}: copies {roofline.bandwidth / 1e9:,.0f} GB/s, multiplies "
        f"{roofline.flops / 1e12:,.1f} TFLOP/s in {roofline.dtype}",
        flush=True,
    )
    wrong = check_cases()
    timings = time_attention(roofline, real)
    model, rows = (PRESETS["llama-3.1-8b"], (1, 8, 64, 256)) if real else (TINY, (2, 8))
    steps = [time_decode_step(model, count, CONTEXT if real else 64, roofline, real) for count in rows]
    print(f"{len(wrong)} wrong cases, {time.perf_counter() - started:.0f} s in all")
    if flags.json:
        document = {"roofline": dataclasses.asdict(roofline), "wrong": wrong, "attention": timings, "steps": steps}
        flags.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def check_cases() -> list[str]:
    """Run every named case on this device's own backend; the names of those that differ from the reference."""
    wrong = []
    for name, difference, tolerance in _differences():
        if isinstance(difference, str):
            print(f"  {name:<40} refused: {difference}")
            continue
        is_right = difference <= tolerance
        print(f"  {name:<40} {difference:.1e} of {tolerance:.0e} {'' if is_right else 'WRONG'}", flush=True)
        wrong += [] if is_right else [name]
    return wrong


def _differences() -> Iterator[tuple[str, float | str, float]]:
    """Name, largest relative difference (or why it was refused), tolerance of every case."""
    platform = jax.default_backend()
    for case in attention_cases.CASES:
        arrays, layout = attention_cases.make(case, platform), case.layout(platform)
        attend = partial(
            attention_op.paged_attention,
            *arrays,
            **attention_cases.make_options(case)._asdict(),
            layout=layout,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
        )
        yield (
            f"attention {case.name}",
            _difference(attend, _best("paged_attention"), max_q_len=case.max_q_len),
            TOLERANCE[case.dtype],
        )
    for case in write_cases.CASES:
        arrays, layout = write_cases.make(case, platform), case.layout(platform)
        write = partial(write_op.kv_write, *arrays, layout=layout, kv_scales=write_cases.make_scales(case))
        yield f"kv_write {case.name}", _difference(write, _best("kv_write")), 0.0


def _difference(call: Callable[..., jax.Array], implementation: str, **options: Any) -> float | str:
    want = np.asarray(call(implementation="reference").astype(jnp.float32))
    try:
        got = np.asarray(jax.jit(partial(call, implementation=implementation, **options))().astype(jnp.float32))
    except NotImplementedError as refusal:
        return str(refusal)
    if want.ndim == 5:  # a cache: its dummy page may hold anything
        want, got = want[:, 1:], got[:, 1:]
    if not want.size:
        return 0.0
    return float(np.max(np.abs(got - want) / np.maximum(np.abs(want), 1.0)))


def _best(op: str) -> str:
    return next(choice.implementation for choice in kernels.explain(op) if choice.available)


def time_attention(roofline: Roofline, real: bool) -> list[dict[str, Any]]:
    """Every implementation on the benchmark's shapes of Llama-3.1-8B, cuDNN beside them where it applies."""
    results = []
    for case in kernels.local_cases("llama8b" if real else "smollm2_decode_8x512", roofline.dtype):
        for name in kernels.implementations(""):
            try:
                results.append(kernels.measure(case, name, roofline, repeat=5))
            except NotImplementedError as refusal:
                print(f"  {case.name} on {name}: refused: {refusal}")
        if real:
            results += _dense(case, roofline)
    for line in kernels.table(results):
        print(line, flush=True)
    return [dataclasses.asdict(result) for result in results]


def _dense(case: attention_cases.Case, roofline: Roofline) -> list[kernels.Result]:
    """jax.nn.dot_product_attention over keys in one piece: what it would take without pages. Equal rows only."""
    if len(set(case.rows)) != 1 or case.kv_dtype:
        return []
    (q_len, kv_len), rows = case.rows[0], len(case.rows)
    q = jnp.ones((rows, q_len, case.num_heads, case.head_dim), case.dtype)
    kv = jnp.ones((rows, kv_len, case.kv_heads, case.head_dim), case.dtype)
    lens = jnp.full(rows, kv_len, jnp.int32)
    results = []
    names: tuple[Literal["xla", "cudnn"], ...] = ("xla", "cudnn")
    for name in names:
        attend = partial(jax.nn.dot_product_attention, implementation=name)

        def many(q: jax.Array, attend: Callable[..., jax.Array] = attend) -> jax.Array:
            return jax.lax.fori_loop(0, STEPS, lambda _, q: attend(q, kv, kv, key_value_seq_lengths=lens), q)

        try:
            seconds = [s / STEPS for s in all_seconds(jax.jit(many), q, repeat=5)]
        except Exception as error:  # cuDNN refuses some shapes with errors of its own
            print(f"  {case.name} on dense {name}: {str(error).splitlines()[0][:120]}")
            continue
        results.append(kernels.result_of(case, f"dense {name}", seconds, roofline))
    return results


def time_decode_step(model: ModelConfig, rows: int, context: int, roofline: Roofline, real: bool) -> dict[str, Any]:
    """The decode program at `rows` rows of `context` tokens with random weights: milliseconds and percent of floor."""
    platform, dtype = jax.default_backend(), roofline.dtype
    size = kernels.PAGE_SIZES[platform]
    slots, width = max(rows, 2), context // size
    layout = KVLayout(platform, dtype, model.num_kv_heads, model.head_dim, size)
    limits = Limits(page_size=size, num_pages=rows * width + 1, max_model_len=context, vocab_size=model.vocab_size)
    scheduler = SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=slots)
    registry = Registry(StepStatics(model, layout), scheduler, limits, dtype)
    shape = registry.shapes.decode[-1]
    program, state = registry.compile(shape), registry.compile("init").call()
    specs = llama.param_specs(model)
    params = jax.jit(partial(init, specs, jnp.dtype(dtype)))() if real else init(specs, jnp.dtype(dtype))
    packed = Packer(limits, slots).pack(_decode_plan(rows, context, width), shape)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state, out, _ = program.call(params, state, packed)
        out.block_until_ready()
        seconds.append(time.perf_counter() - start)
    weights = nbytes(specs, dtype) - (0 if model.tie_word_embeddings else nbytes({"e": specs["embedding"]}, dtype))
    live = model.num_layers * rows * width * layout.page_bytes
    median = statistics.median(seconds[2:])
    percent = 100 * (weights + live) / roofline.bandwidth / median
    print(
        f"decode step, {rows} rows of {context} tokens: {median * 1e3:.2f} ms (min {min(seconds) * 1e3:.2f}), "
        f"{rows / median:,.0f} tokens/s, {percent:.0f} % of the memory floor",
        flush=True,
    )
    return {"rows": rows, "context": context, "milliseconds": median * 1e3, "percent_of_floor": percent}


def _decode_plan(rows: int, context: int, width: int) -> StepPlan:
    """Every row decodes its last position, each over pages of its own."""
    request = Request(
        request_id="check", prompt_token_ids=(1,) * context, params=SamplingParams(temperature=0.0),
        eos_token_ids=(), seed=0, max_tokens=1,
    )  # fmt: skip
    return StepPlan(
        1,
        tuple(
            ScheduledRow(
                sequence=Sequence(request), slot=row, start=context - 1, q_len=1, kind=RowKind.NEW, samples=True,
                token_ids=(1,), page_table=tuple(range(1 + row * width, 1 + (row + 1) * width)), num_output=0,
                next_token=-1,
            )
            for row in range(rows)
        ),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
