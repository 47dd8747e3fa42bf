"""Kernels measured: named shapes × implementations, against what the device was just seen to do.

    jcb bench kernels [--case TEXT] [--implementation NAME] [--tune]

A call is timed inside one program that runs it many times, each result the next one's queries, so that nothing but the
kernel counts. Every number comes with the device it was measured on.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jcb.bench.roofline import Roofline, all_seconds, measure_roofline
from pallas_kernels import tuning
from pallas_kernels.dispatch import explain, find
from pallas_kernels.paged_attention.cases import BENCH, Case, make, make_options
from pallas_kernels.paged_attention.cost import cost_of

OP = "paged_attention"
DTYPES = ("float32", "bfloat16")
PAGE_SIZES = {"cpu": 16, "gpu": 64, "tpu": 128}
_CPU_LIMIT = 64 << 20
"""Bytes of live cache above which a CPU skips a case that was not asked for by name."""


@dataclass(frozen=True)
class Result:
    """One case on one implementation. microseconds: median, least and most of one call."""

    case: str
    implementation: str
    microseconds: float
    least: float
    most: float
    gigabytes_per_second: float
    teraflops_per_second: float
    percent_of_roofline: float


def local_cases(text: str = "", dtype: str = "") -> list[Case]:
    """The benchmark's shapes whose name contains `text`, with data type and page size of this machine."""
    platform = jax.default_backend()
    dtype = dtype or ("float32" if platform == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    cases = [dataclasses.replace(c, dtype=dtype, page_size=PAGE_SIZES[platform]) for c in BENCH if text in c.name]
    if not cases:
        raise ValueError(f"no case has {text!r} in its name; they are {', '.join(case.name for case in BENCH)}")
    if platform == "cpu" and not text:
        cases = [case for case in cases if cost_of(case).nbytes <= _CPU_LIMIT]
    return cases


def seconds_of(case: Case, implementation: str, *, repeat: int, blocks: Any = None) -> list[float]:
    """Seconds of one call, `repeat` times. blocks: tile sizes instead of the chosen ones.

    Raises NotImplementedError("why") where the implementation refuses the shape.
    """
    platform = jax.default_backend()
    arrays, layout = make(case, platform, poison=False), case.layout(platform)
    options: dict[str, Any] = {} if blocks is None else {f"{_phase(case)}_blocks": blocks}
    attend = partial(
        find(OP, implementation, platform),
        layout=layout,
        scale=case.head_dim**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        max_q_len=case.max_q_len,
        **make_options(case)._asdict(),
        **options,
    )

    @jax.jit
    def many(count: jax.Array, q: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, q: attend(q, *rest), q)

    once = min(all_seconds(many, jnp.int32(1), *arrays, repeat=2))
    count = max(1, min(int(0.05 / max(once, 1e-6)), 200))
    return [s / count for s in all_seconds(many, jnp.int32(count), *arrays, repeat=repeat)]


def measure(case: Case, implementation: str, roofline: Roofline, repeat: int, blocks: Any = None) -> Result:
    """One line of the table."""
    return result_of(case, implementation, seconds_of(case, implementation, repeat=repeat, blocks=blocks), roofline)


def result_of(case: Case, implementation: str, seconds: list[float], roofline: Roofline) -> Result:
    """What times of one call mean."""
    cost, median = cost_of(case), statistics.median(seconds)
    return Result(
        case=case.name,
        implementation=implementation,
        microseconds=median * 1e6,
        least=min(seconds) * 1e6,
        most=max(seconds) * 1e6,
        gigabytes_per_second=cost.nbytes / median / 1e9,
        teraflops_per_second=cost.flops / median / 1e12,
        percent_of_roofline=100 * cost.seconds(roofline.bandwidth, roofline.flops) / median,
    )


def implementations(asked: str) -> list[str]:
    """What can run here in the order "auto" tries it, the reference left out unless asked for."""
    usable = [choice.implementation for choice in explain(OP) if choice.available]
    if asked and asked not in usable:
        raise ValueError(f"implementation {asked!r} cannot run here; these can: {', '.join(usable)}")
    return [asked] if asked else [name for name in usable if name != "reference"]


def tune(case: Case, implementation: str, repeat: int, say: Callable[[str], None]) -> tuning.Entry | None:
    """Measure every candidate tile size of `case`; the fastest as an entry, or None where there is no choice.

    Raises NotImplementedError("why") where the implementation refuses the shape.
    """
    platform, phase = jax.default_backend(), _phase(case)
    module = import_module(f"pallas_kernels.{OP}.{implementation}")
    if not hasattr(module, "candidates"):
        return None
    layout = case.layout(platform)
    default = module.default_blocks(layout, case.num_heads, phase)
    found: dict[Any, float] = {}
    for blocks in dict.fromkeys((default, *module.candidates(layout, case.num_heads, phase))):
        try:
            found[blocks] = statistics.median(seconds_of(case, implementation, repeat=repeat, blocks=blocks))
        except jax.errors.JaxRuntimeError as error:  # the compiler's word that these sizes do not fit the chip
            say(f"    {blocks}: {str(error).splitlines()[0][:100]}")
            continue
        say(f"    {blocks}: {found[blocks] * 1e6:.1f} µs")
    best = min(found, key=lambda blocks: found[blocks])
    return tuning.Entry(
        device=tuning.device_kind(platform),
        implementation=implementation,
        shape=tuning.ShapeClass.of(layout, case.num_heads, case.dtype, phase),
        blocks=dataclasses.asdict(best),
        microseconds=round(found[best] * 1e6, 1),
        untuned_microseconds=round(found[default] * 1e6, 1),
        measured=f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, jax {jax.__version__}",
    )


def table(results: list[Result]) -> Iterator[str]:
    """The table's lines."""
    heads = "".join(f"{head:>10}" for head in ("µs", "min", "max", "GB/s", "TFLOP/s", "roofline"))
    yield f"{'case':<30}{'implementation':<16}{heads}"
    for r in results:
        yield (
            f"{r.case:<30}{r.implementation:<16}{r.microseconds:>10.1f}{r.least:>10.1f}{r.most:>10.1f}"
            f"{r.gigabytes_per_second:>10.1f}{r.teraflops_per_second:>10.3f}{r.percent_of_roofline:>9.1f}%"
        )


def run(
    *, case: str = "", implementation: str = "", dtype: str = "", repeat: int = 5, tune_blocks: bool = False,
    output: Path | None = None, say: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Measure (or tune) and print. output: JSON of the results; with tune_blocks the tuned.json to write."""
    if repeat < 1:
        raise ValueError(f"{repeat=} must be at least 1")
    cases, names = local_cases(case, dtype), implementations(implementation)
    roofline = measure_roofline(cases[0].dtype, repeat)
    say(
        f"{roofline.device}, jax {jax.__version__}: copies {roofline.bandwidth / 1e9:.1f} GB/s, "
        f"multiplies {roofline.flops / 1e12:.2f} TFLOP/s in {roofline.dtype}"
    )
    if tune_blocks:
        return _tune_all(cases, names, repeat, output, say)
    results: list[Result] = []
    for one in cases:
        for name in names:
            say(f"  {one.name} on {name} ...")
            try:
                results.append(measure(one, name, roofline, repeat))
            except NotImplementedError as refusal:
                say(f"    refused: {refusal}")
    for line in table(results):
        say(line)
    if output is not None:
        document = {"roofline": dataclasses.asdict(roofline), "results": [dataclasses.asdict(r) for r in results]}
        output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _tune_all(cases: list[Case], names: list[str], repeat: int, output: Path | None, say: Callable[[str], None]) -> int:
    entries: list[tuning.Entry] = []
    for one in cases:
        for name in names:
            say(f"  {one.name} on {name}")
            try:
                entry = tune(one, name, repeat, say)
            except NotImplementedError as refusal:
                say(f"    refused: {refusal}")
                continue
            if entry is not None:
                gain = entry.untuned_microseconds / entry.microseconds
                say(f"  best: {entry.blocks}, {gain:.2f} x the untuned speed")
                entries.append(entry)
    path = output or tuning.FOLDER / OP / "tuned.json"
    path.write_text(tuning.dump(tuning.merge(tuning.load(OP), tuple(entries))), encoding="utf-8")
    say(f"wrote {path}")
    return 0


def _phase(case: Case) -> tuning.Phase:
    return "decode" if case.is_decode else "chunk"
