"""A plan as a table for people, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from jcb.plan.buckets import SECONDS_PER_PROGRAM
from jcb.plan.goal import Search, Trial
from jcb.plan.planner import Fit, Plan, Speed
from jcb.simulate.report import seconds

_GIB = 1 << 30
_WIDTH = 110  # where the output is no terminal


def to_json(plan: Plan, compile_seconds: float | None) -> str:
    """Everything in the plan as one JSON object; bytes of each device, times in seconds."""
    each = compile_seconds or SECONDS_PER_PROGRAM
    more = {
        "usable_pages": plan.memory.usable_pages,
        "programs": plan.programs,
        "compile_seconds": each * plan.programs,
        "output_tokens_per_second_per_chip": plan.full.output_rate / plan.devices,
        "floor_output_tokens_per_second_per_chip": plan.floor_full.output_rate / plan.devices,
    }
    return json.dumps(dataclasses.asdict(plan) | more, indent=1)


def search_json(found: Search) -> str:
    """A search as one JSON object: the goal, the best trial, all trials, what binds."""
    return json.dumps(
        {
            "goal": dict(found.goal.limits),
            "percentile": found.goal.percentile,
            "workload": dataclasses.asdict(found.workload),
            "met": found.best.is_met,
            "binds": found.binds,
            "best": _trial_dict(found.best),
            "trials": [_trial_dict(trial) for trial in found.trials],
        },
        indent=1,
    )


def _trial_dict(trial: Trial) -> dict[str, object]:
    """Infinity, which JSON lacks, is null."""
    return dataclasses.asdict(trial) | {"worst": trial.worst if math.isfinite(trial.worst) else None}


def show(plan: Plan, compile_seconds: float | None = None, console: Console | None = None) -> None:
    """Print the plan."""
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    chips = f"{plan.devices} x {plan.chip}" if plan.devices > 1 else plan.chip
    also = f", {plan.replicas} replicas of that" if plan.replicas > 1 else ""
    console.print(f"[bold]{plan.model}[/], {plan.parameters:,} parameters in {plan.dtype}, on {chips}{also}")
    for title, rows in (
        (f"memory of each device, {plan.memory.memory / _GIB:.2f} GiB", _memory(plan)),
        ("sequences", _sequences(plan)),
        ("programs to compile", _programs(plan, compile_seconds)),
    ):
        console.print(_table(title, ("", "", ""), rows))
    heads = ("", "floor", "forecast")
    console.print(_table(f"{plan.input_len:,} tokens in, {plan.output_len:,} out", heads, _speeds(plan)))
    console.print(f"first limit: {plan.limit}")
    console.print(f"a full decode step is bound by {plan.bound}")
    speed = "with the step times given" if plan.is_fitted else "at 85 % of its bandwidth and 60 % of its peak"
    console.print(
        "floor: the chip's bandwidth and peak with no overhead. forecast: the real scheduler on a simulated chip "
        f"{speed}; clients ask one request after another, of mixed answer lengths.",
        style="dim",
    )


def _table(title: str, heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=any(heads), box=None, pad_edge=False
    )
    table.add_column(heads[0])
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan) -> Iterator[tuple[str, ...]]:
    memory = plan.memory
    left = memory.budget - memory.weights - memory.reserve - memory.pages
    yield "weights", f"{memory.weights:,} B", _gib(memory.weights)
    yield "reserve for temporaries (jcb aot says how much)", f"{memory.reserve:,} B", _gib(memory.reserve)
    pages = f"{memory.num_pages:,} pages of {memory.page_size} tokens, one a dummy"
    yield pages, f"{memory.pages:,} B", _gib(memory.pages)
    yield "left", f"{left:,} B", _gib(left)
    yield "not to be used", f"{memory.memory - memory.budget:,} B", _gib(memory.memory - memory.budget)
    yield "one token of K and V", f"{memory.kv_token:,.0f} B", f"{memory.usable_pages * memory.page_size:,} tokens fit"


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.3f} GiB"


def _sequences(plan: Plan) -> Iterator[tuple[str, ...]]:
    for name, fit in (
        (f"worst case: each of max_model_len={plan.max_model_len:,} tokens", plan.worst),
        (f"each with its whole answer, {plan.longest.tokens:,.0f} tokens", plan.longest),
        (f"actual use: on average {plan.average.tokens:,.0f} tokens", plan.average),
    ):
        yield name, f"{fit.pages:,.4g} pages", _count(fit, plan.max_num_seqs)
    yield (
        "whose prompts max_num_batched_tokens keeps up with",
        f"{plan.max_num_batched_tokens:,}",
        f"{plan.sustained:,}",
    )


def _count(fit: Fit, slots: int) -> str:
    beside = f" (pages hold {fit.by_pages:,})" if fit.by_pages > slots else ""
    return f"{fit.sequences:,} at once{beside}"


def _programs(plan: Plan, compile_seconds: float | None) -> Iterator[tuple[str, ...]]:
    yield f"decode steps of {_listed(plan.decode_programs)} rows", f"{len(plan.decode_programs)}", ""
    tokens = sorted({tokens for tokens, _ in plan.prefill_programs})
    rows = sorted({rows for _, rows in plan.prefill_programs})
    yield f"steps of {_listed(tokens)} tokens in {_listed(rows)} rows", f"{len(plan.prefill_programs)}", ""
    each = compile_seconds or SECONDS_PER_PROGRAM
    source = "as given" if compile_seconds else "assumed"
    total = f"{plan.programs * each:,.0f} s at {each:g} s each, {source}"
    yield "with those that pick, load and set up", f"{plan.programs}", total


def _listed(numbers: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _speeds(plan: Plan) -> Iterator[tuple[str, ...]]:
    for floor, forecast in ((plan.floor_alone, plan.alone), (plan.floor_full, plan.full)):
        who = f"{forecast.clients} client{'s' if forecast.clients > 1 else ''}: "
        yield from _speed(who, floor, forecast, plan.devices)


def _speed(who: str, floor: Speed, forecast: Speed, devices: int) -> Iterator[tuple[str, ...]]:
    yield f"{who}TTFT (median)", seconds(floor.ttft), seconds(forecast.ttft)
    yield f"{who}TPOT (median)", seconds(floor.tpot), seconds(forecast.tpot)
    rates = (f"{speed.output_rate / devices:,.0f}" for speed in (floor, forecast))
    yield (f"{who}output tokens/s a chip", *rates)
