"""Figures of cost that do not depend on the machine's mood, and the baseline that they are compared with.

python -m jcb.bench.perf_facts [--check]

Of the default model's step programs, compiled for a CPU with the XLA implementations and dense float32 weights: what
the optimised program computes, reads and writes, its temporaries and what it updates in place. Of the host: bytecode
instructions of a step on an empty device. The first depend on the version of JAX, the second on that of Python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jcb.aot import traffic
from jcb.bench.host import Bench
from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.reader import open_checkpoint
from jcb.config import Limits, SchedulerConfig
from jcb.models.presets import PRESETS
from jcb.steps.registry import Registry, compile_threads, name_of
from jcb.steps.step import StepStatics
from jcb.text.tokenizer import load_tokenizer
from pallas_kernels.layout import KVLayout

BASELINE = Path(__file__).parents[2] / "tests" / "bench" / "perf_facts.json"
BAND = 0.03
"""How far a figure may be from its baseline."""

PROGRAMS = ("decode 8", "prefill 128 x 8", "prefill 512 x 64")
"""Those that are compiled: one of each kind, a small and the largest. All of them would take minutes."""

ROWS, STEPS = 32, 10
"""Of the host's steps."""

Facts = dict[str, dict[str, float]]
"""Figures by program (or kind of step) and name."""

_OPTIONS = {"xla_cpu_max_isa": "AVX2"} if platform.machine() == "x86_64" else {}


def program_key() -> str:
    """What the figures of programs depend on."""
    return f"jax {importlib.metadata.version('jax')}, {platform.machine()}"


def host_key() -> str:
    """What the figures of the host depend on."""
    return f"python {sys.version_info.major}.{sys.version_info.minor}"


def program_facts() -> Facts:
    """Compiles PROGRAMS. Operations and bytes are of a whole step, loops by the times they run."""
    model = PRESETS["smollm2-135m"]
    limits = Limits(page_size=16, num_pages=2049, max_model_len=2048, vocab_size=model.vocab_size)
    layout = KVLayout("cpu", "float32", model.num_kv_heads, model.head_dim, limits.page_size)
    registry = Registry(StepStatics(model, layout, "xla"), SchedulerConfig(), limits, "float32")
    keys = [key for key in registry.keys if name_of(key) in PROGRAMS]
    assert len(keys) == len(PROGRAMS), f"{PROGRAMS} are not all in the registry"

    def compile_one(key: Any) -> tuple[str, dict[str, float]]:
        program = registry.compile(key, _OPTIONS)
        moved = traffic.count(program.call.as_text()).at(1.0)
        return program.name, {
            "flops": moved.flops,
            "bytes_accessed": moved.nbytes,
            "temp_bytes": program.temp_bytes,
            "alias_bytes": program.alias_bytes,
        }

    with compile_threads(2) as pool:
        found = dict(pool.map(compile_one, keys))
    return {"registry": {"programs": len(registry)}} | found


def host_facts() -> Facts:
    """Bytecode instructions and calls into Python functions of one decode step, text included."""
    tokenizer = load_tokenizer(open_checkpoint(default_model_path()))
    bench = Bench(ROWS, 2, tokenizer, steps=4 * STEPS)
    bench.block(STEPS)
    events = sys.monitoring.events
    counts = {
        "instructions": count_events(events.INSTRUCTION, lambda: bench.block(STEPS)) / STEPS,
        "calls": count_events(events.PY_START, lambda: bench.block(STEPS)) / STEPS,
    }
    return {f"decode step of {ROWS} rows": counts}


def count_events(event: int, run: Callable[[], object]) -> int:
    """How often `event` of `sys.monitoring` happens in this thread while `run` runs."""
    monitoring, me, count = sys.monitoring, threading.get_ident(), 0

    def note(*_: object) -> None:
        nonlocal count
        count += threading.get_ident() == me

    tool = monitoring.PROFILER_ID
    monitoring.use_tool_id(tool, "jcb.bench.perf_facts")
    monitoring.register_callback(tool, event, note)
    try:
        monitoring.set_events(tool, event)
        run()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
    return count


def differences(found: Facts, baseline: Mapping[str, Mapping[str, float]], band: float = BAND) -> Iterator[str]:
    """A sentence for each figure that is not within `band` of its baseline, or has none, or is gone."""
    advice = "if that is meant, `make perf-facts` writes the new baseline"
    for name in sorted({*found, *baseline}):
        now, before = found.get(name, {}), baseline.get(name, {})
        for figure in sorted({*now, *before}):
            if figure not in now or figure not in before:
                where = "is new" if figure in now else "is gone"
                yield f"{name}: {figure} {where}; {advice}"
                continue
            a, b = now[figure], before[figure]
            if abs(a - b) > band * abs(b):
                change = f"{a / b - 1:+.1%}, allowed {band:.0%}" if b else f"allowed {band:.0%}"
                yield f"{name}: {figure} is {a:,.0f}, the baseline says {b:,.0f} ({change}); {advice}"


def load(path: Path = BASELINE) -> dict[str, Facts]:
    """Every baseline, by key."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main(arguments: list[str] | None = None) -> int:
    """Writes the baseline of this machine's versions beside those of others, or compares; status 1 when they differ."""
    parser = argparse.ArgumentParser(prog="python -m jcb.bench.perf_facts", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE", help="the JSON file")
    flags = parser.parse_args(arguments)
    found, baseline = {program_key(): program_facts(), host_key(): host_facts()}, load(flags.baseline)
    lines = [line for key, facts in found.items() for line in differences(facts, baseline.get(key, {}))]
    for key, facts in found.items():
        for name, figures in facts.items():
            print(f"{key}: {name:<24}", ", ".join(f"{figure} {value:,.0f}" for figure, value in figures.items()))
    print(*lines, sep="\n")
    if flags.check:
        return 1 if lines else 0
    text = json.dumps(baseline | found, indent=2, sort_keys=True) + "\n"
    flags.baseline.write_text(text, encoding="utf-8")
    print(f"wrote {flags.baseline}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
