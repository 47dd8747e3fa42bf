"""Step programs of the real default model against the floor that this machine showed in the same run.

python -m jcb.bench.steps [--rows 8 32 64] [--context 256] [--chunk 512] [--contexts 512 1024 2048 4096] [--rounds 5]

Every case is measured in turn, round after round; a figure is a median with its least and most. The floor of a step is
the time to read its weights and live keys and values once at the measured bandwidth, or to do its arithmetic at the
measured rate, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jcb.bench.exposed import seconds_of_steps
from jcb.bench.roofline import measure_roofline
from jcb.bench.rows import PAGE_SIZE, Crowd, narrow_config
from jcb.bench.spread import spread
from jcb.config import Limits
from jcb.engine.build import Engine, load_engine
from jcb.simulate.shape import ModelShape
from jcb.types import StepPlan

Say = Callable[[str], None]
_READ_BYTES = 1 << 28


@dataclass
class Calibration:
    """What the machine did between the rounds, best of each: bytes read a second, operations a second."""

    dtype: str
    bandwidth: float = 0.0
    flops: float = 0.0
    history: list[tuple[float, float]] = field(default_factory=list)

    def measure(self) -> None:
        """Once more, for about a second."""
        roofline = measure_roofline(self.dtype, repeat=3)
        bandwidth = roofline.bandwidth if jax.default_backend() != "cpu" else max(roofline.bandwidth, read_bandwidth())
        self.history.append((bandwidth, roofline.flops))
        self.bandwidth = max(self.bandwidth, bandwidth)
        self.flops = max(self.flops, roofline.flops)


def read_bandwidth(repeat: int = 3) -> float:
    """Bytes a second that all cores together read from memory."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = np.array_split(np.ones(_READ_BYTES // 8, np.int64), count)
    best = float("inf")
    for _ in range(repeat):
        threads = [threading.Thread(target=np.max, args=(part,)) for part in parts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - began)
    return _READ_BYTES / best


@dataclass
class Case:
    """One kind of step. nbytes, flops: the least that it must read and do."""

    name: str
    engine: Engine
    plan: StepPlan
    nbytes: float
    flops: float
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def floor(self, calibration: Calibration) -> float:
        """Seconds."""
        return max(self.nbytes / calibration.bandwidth, self.flops / calibration.flops)


def make_case(name: str, engine: Engine, plan: StepPlan) -> Case:
    """A case with its floor's bytes and operations, counted from the plan."""
    shape, weights = ModelShape.of(engine.model), float(engine.report["weights"])
    pairs = sum(row.q_len * (row.start + (row.q_len + 1) / 2) for row in plan.rows)
    samples = sum(row.samples for row in plan.rows)
    flops = 2.0 * (plan.num_tokens * shape.layer_parameters + samples * shape.head_parameters)
    if not samples:  # the head is not needed then
        weights *= shape.layer_parameters / shape.parameters
    nbytes = weights + sum(row.kv_len for row in plan.rows) * shape.kv_bytes(engine.config.cache.kv_dtype)
    return Case(name, engine, plan, nbytes, flops + pairs * shape.attention_flops)


def run_rounds(cases: Sequence[Case], calibration: Calibration, rounds: int, steps: int) -> None:
    """Measure every case once a round."""
    for case in cases:
        seconds_of_steps(case.engine, case.plan, 1)
    for _ in range(rounds):
        calibration.measure()
        for case in cases:
            case.seconds.append(seconds_of_steps(case.engine, case.plan, steps))


def linear_fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Slope, intercept and R² of a straight line through the points."""
    slope, intercept = np.polyfit(x, y, 1)
    rest, total = np.asarray(y) - (slope * np.asarray(x) + intercept), np.asarray(y) - np.mean(y)
    return float(slope), float(intercept), float(1 - (rest @ rest) / (total @ total))


def line_of(case: Case, calibration: Calibration) -> str:
    """One line of the table."""
    median, least, most = (1e3 * value for value in spread(case.seconds))
    floor = case.floor(calibration) * 1e3
    return f"{case.name:<38}{median:>9.2f}{least:>9.2f}{most:>9.2f}{floor:>9.2f}{100 * floor / median:>8.0f} %"


def as_json(case: Case, calibration: Calibration) -> dict[str, Any]:
    """The case's figures."""
    floor = case.floor(calibration)
    return {
        "name": case.name,
        "milliseconds": [1e3 * value for value in spread(case.seconds)],
        "all_milliseconds": [1e3 * value for value in case.seconds],
        "floor_milliseconds": 1e3 * floor,
        "percent_of_floor": 100 * floor / case.median,
        "floor_bytes": case.nbytes,
        "floor_flops": case.flops,
    }


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """rows, context: of the decode steps. contexts: of `few` rows. Each case runs `steps` steps in each round.

    settings: "key=value" texts for the engines.
    """

    rows: tuple[int, ...]
    context: int
    chunk: int
    contexts: tuple[int, ...]
    few: int
    rounds: int
    steps: int
    settings: tuple[str, ...] = ()


class Beds:
    """The engines of one run: `long` for most cases, `double` with twice its longest sequence, `few` with as many
    slots as rows are live in it.
    """

    def __init__(self, sizes: Sizes, say: Say) -> None:
        few, chunk, longest = sizes.few, sizes.chunk, max(*sizes.contexts, sizes.context, sizes.chunk)
        rows, most = (*sizes.rows, few), max(*sizes.rows, few)
        pages = max(few * -(-longest // PAGE_SIZE), most * -(-sizes.context // PAGE_SIZE)) + 2
        make = partial(narrow_config, tokens=chunk, pages=pages, settings=sizes.settings)
        configs = {
            "long": make(rows=rows, longest=longest),
            "double": make(rows=(few,), longest=2 * longest, slots=most),
            "few": make(rows=(few,), longest=longest),
        }
        self._engines: dict[str, Engine] = {}
        for name, config in configs.items():
            say(f"loading and compiling the engine {name!r} ...")
            self._engines[name] = load_engine(config)

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def decode(self, name: str, rows: int, context: int) -> Case:
        """So many rows, all of one length."""
        engine = self[name]
        plan = Crowd(_limits(engine), rows, context).decode(context)
        length, slots = engine.config.scheduler.max_model_len, engine.config.scheduler.max_num_seqs
        return make_case(f"{rows} rows x {context:,} ({slots} slots, {length:,} max)", engine, plan)

    def chunk(self, tokens: int) -> Case:
        """The first `tokens` tokens of a prompt."""
        engine = self["long"]
        return make_case(f"prefill chunk of {tokens}", engine, Crowd(_limits(engine), 1, tokens).chunk(tokens))


def _limits(engine: Engine) -> Limits:
    assert engine.info.limits is not None
    return engine.info.limits


def measure(sizes: Sizes, say: Say) -> dict[str, Any]:
    """All cases, and what they say together."""
    beds, few, context = Beds(sizes, say), sizes.few, sizes.context
    calibration = Calibration(beds["long"].config.dtype)
    prefill = beds.chunk(sizes.chunk)
    along = [beds.decode("long", few, length) for length in sizes.contexts]
    base, double, alone = (beds.decode(name, few, context) for name in ("long", "double", "few"))
    decodes = [base if rows == few else beds.decode("long", rows, context) for rows in sizes.rows]
    cases = list({id(case): case for case in (*decodes, prefill, *along, base, double, alone)}.values())
    run_rounds(cases, calibration, sizes.rounds, sizes.steps)
    slope, intercept, r2 = linear_fit(sizes.contexts, [case.median for case in along])
    matmul = prefill.flops / prefill.median / calibration.flops
    doubled, idle = _ratio(double, base), _ratio(base, alone)
    gigabytes, teraflops = calibration.bandwidth / 1e9, calibration.flops / 1e12
    say(f"\nbest of the rounds: reads {gigabytes:.1f} GB/s, multiplies {teraflops:.3f} TFLOP/s in {calibration.dtype}")
    say(f"{'step':<38}{'ms':>9}{'min':>9}{'max':>9}{'floor':>9}{'of floor':>10}")
    for case in cases:
        say(line_of(case, calibration))
    say(f"prefill chunk: {100 * matmul:.0f} % of the measured matmul rate (goal 60)")
    say(f"{few} rows against context: {slope * 1e6:.2f} ms a thousand tokens + {intercept * 1e3:.1f} ms, R² {r2:.4f}")
    say(f"twice the max_model_len, same context: {doubled[0]:.3f} x ({doubled[1]:.3f} … {doubled[2]:.3f}; goal 1.03)")
    say(f"idle slots beside {few} live ones: {idle[0]:.3f} x ({idle[1]:.3f} … {idle[2]:.3f}; goal 1.10)")
    return {
        "dtype": calibration.dtype,
        "weights_bytes": beds["long"].report["weights"],
        "calibration": [{"bandwidth": b, "flops": f} for b, f in calibration.history],
        "cases": [as_json(case, calibration) for case in cases],
        "prefill_share_of_matmul_rate": matmul,
        "context": {"tokens": list(sizes.contexts), "seconds_per_token": slope, "seconds": intercept, "r2": r2},
        "doubling_max_model_len": doubled,
        "idle_slots": idle,
    }


def _ratio(a: Case, b: Case) -> list[float]:
    """Of times in the same round: median, least and most."""
    return spread([x / y for x, y in zip(a.seconds, b.seconds, strict=True)])


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m jcb.bench.steps", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64], help="rows of the decode steps")
    parser.add_argument("--context", type=int, default=256, help="tokens that each row has")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prefill chunk")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 3072, 4096], help="lengths to fit")
    parser.add_argument("--few", type=int, default=8, help="rows of the cases along context and beside idle slots")
    parser.add_argument("--rounds", type=int, default=7, help="how often each case is measured")
    parser.add_argument("--steps", type=int, default=3, help="steps of a case in a round")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="of the engine, as in activations=int8",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures there as JSON")
    flags = parser.parse_args(arguments)
    if min(*flags.rows, flags.few, flags.context, flags.chunk, *flags.contexts, flags.rounds, flags.steps) < 1:
        parser.error("every number must be at least 1")
    if len(flags.contexts) < 2:
        parser.error("a line needs two contexts or more")
    output = flags.__dict__.pop("output")
    for name in ("rows", "contexts"):
        setattr(flags, name, tuple(sorted(set(getattr(flags, name)))))
    flags.settings = tuple(flags.settings)
    figures = measure(Sizes(**vars(flags)), print)
    if output is not None:
        output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
