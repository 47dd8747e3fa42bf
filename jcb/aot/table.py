"""A report as a table for people, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from jcb.aot.preflight import Report
from jcb.aot.protocol import Row

_GIB = 1 << 30
_WIDTH = 140  # where the output is no terminal


def to_json(report: Report) -> str:
    """Everything in the report as one JSON object."""
    chip = report.topology.chip
    return json.dumps(
        {
            "topology": report.topology.name,
            "chip": {"title": chip.title, "memory": chip.memory, "bandwidth": chip.bandwidth, "flops": chip.flops},
            "plan": dataclasses.asdict(report.plan),
            "programs": [_row_dict(row) for row in report.rows],
            "needed_bytes": report.needed_bytes,
            "fits": not report.problems,
            "problems": report.problems,
        },
        indent=1,
    )


def _row_dict(row: Row) -> dict[str, object]:
    return dataclasses.asdict(row) | {"needed_bytes": row.needed_bytes, "over_floor": row.over_floor}


def show(report: Report, console: Console | None = None) -> None:
    """Print the plan, one line a program, and what would fail."""
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    plan, chip = report.plan, report.topology.chip
    devices = f"{plan.devices} of {report.topology.num_devices} devices"
    console.print(
        f"[bold]{chip.title}[/] ({report.topology.name}, {devices}): {chip.memory / _GIB:.2f} GiB, "
        f"{chip.bandwidth / 1e12:.2f} TB/s, {chip.flops / 1e12:.0f} TFLOP/s bfloat16 each"
    )
    console.print(
        f"each holds {plan.weights / _GIB:.2f} GiB of weights ({plan.dtype}) and {plan.num_pages:,} pages of "
        f"{plan.page_size} tokens in {plan.pages / _GIB:.2f} GiB; up to {plan.max_num_seqs} sequences of "
        f"{plan.max_model_len:,} tokens"
    )
    console.print(_table(report.rows))
    console.print(
        "MiB of each device. moved: memory traffic of one step, its rows as long as max_model_len and the pages allow; "
        "floor: weights and those rows once. + marks programs with loops of a length known only when they run, counted "
        "once.",
        style="dim",
    )
    for problem in report.problems:
        console.print(f"[bold red]fails[/] {problem}", highlight=False)
    if not report.problems:
        console.print(f"[bold green]fits[/]: {report.needed_bytes / _GIB:.2f} of {chip.memory / _GIB:.2f} GiB")


def _table(rows: tuple[Row, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("program", no_wrap=True)
    for name in ("s", "arguments", "alias", "temporary", "code", "GFLOP", "moved", "floor", "ratio", "floor ms", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *(_cells(row) if not row.error else ["-"] * 11))
    return table


def _cells(row: Row) -> list[str]:
    floor = bool(row.floor_bytes)
    return [
        f"{row.seconds:.1f}",
        _mib(row.argument_bytes),
        _mib(row.alias_bytes),
        _mib(row.temp_bytes),
        _mib(row.code_bytes) if row.code_bytes else "-",
        f"{row.flops / 1e9:,.1f}",
        _mib(row.bytes_accessed) + ("+" if row.unknown_loops else ""),
        _mib(row.floor_bytes) if floor else "-",
        f"{row.over_floor:.2f}" if floor else "-",
        f"{row.floor_seconds * 1e3:.2f}" if floor else "-",
        f"{row.needed_bytes / _GIB:.2f}",
    ]


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f}" if count < 100 << 20 else f"{count / (1 << 20):,.0f}"
