"""A run's figures as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jcb.simulate.stats import RunStats, Summary

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def seconds(value: float) -> str:
    """Three digits and the unit that fits, such as "12.3 ms"."""
    for size, unit in _UNITS:
        if value >= size or size == 1e-6:
            return f"{value / size:.3g} {unit}" if value < 1000 else f"{value:,.0f} s"
    raise AssertionError("unreachable")


def lines(stats: RunStats) -> list[str]:
    """What a run came to, a line each."""
    rows = [
        ("requests", f"{stats.finished:,} finished{_others(stats)} in {seconds(stats.elapsed)}"),
        ("throughput", _throughput(stats)),
        ("time to first token", _spread(stats.ttft)),
        ("time per output token", _spread(stats.tpot)),
        ("inter-token latency", _spread(stats.gaps)),
        ("end to end", _spread(stats.latency)),
        ("waited for a slot", _spread(stats.queue)),
        ("device step", _spread(stats.step)),
        ("device busy", f"{stats.utilisation:.1%} of the time, {stats.occupancy.mean:.1f} rows a step"),
        ("padding", f"{stats.padding:.1%} of the computed tokens"),
        ("prompt tokens cached", f"{_share(stats.cached_tokens, stats.prompt_tokens)}"),
        ("pages used at most", _share(stats.peak_pages, stats.total_pages)),
        ("preemptions", f"{stats.preemptions:,}"),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _others(stats: RunStats) -> str:
    words = (("aborted", stats.aborted), ("failed", stats.failed), ("refused", stats.refused))
    return "".join(f", {count:,} {word}" for word, count in words if count)


def _throughput(stats: RunStats) -> str:
    return (
        f"{stats.per_second(stats.finished):,.2f} requests/s, {stats.per_second(stats.output_tokens):,.0f} output "
        f"tokens/s, {stats.per_second(stats.output_tokens + stats.prompt_tokens):,.0f} tokens/s in all"
    )


def _spread(summary: Summary) -> str:
    if not summary.count:
        return "none"
    parts = (("mean", summary.mean), ("p50", summary.quantile(0.5)), ("p90", summary.quantile(0.9)))
    parts += (("p99", summary.quantile(0.99)), ("max", summary.maximum))
    return ", ".join(f"{name} {seconds(value)}" for name, value in parts)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} ({part:,} of {whole:,})" if whole else "none"


_COMPARED: tuple[tuple[str, Callable[[RunStats], float], Callable[[float], str]], ...] = (
    ("TTFT p50", lambda stats: stats.ttft.quantile(0.5), seconds),
    ("TTFT p99", lambda stats: stats.ttft.quantile(0.99), seconds),
    ("TPOT p50", lambda stats: stats.tpot.quantile(0.5), seconds),
    ("TPOT p99", lambda stats: stats.tpot.quantile(0.99), seconds),
    ("ITL p99", lambda stats: stats.gaps.quantile(0.99), seconds),
    ("output tokens/s", lambda stats: stats.per_second(stats.output_tokens), "{:,.1f}".format),
    ("requests finished", lambda stats: stats.finished, "{:,.0f}".format),
    ("preemptions", lambda stats: stats.preemptions, "{:,.0f}".format),
    ("padding", lambda stats: stats.padding, "{:.1%}".format),
    ("prompt tokens cached", lambda stats: stats.cached_tokens, "{:,.0f}".format),
    ("steps", lambda stats: stats.steps, "{:,.0f}".format),
)


def comparison(runs: Mapping[str, RunStats], base: str) -> list[str]:
    """Runs side by side; behind each but `base` how it differs from that one."""
    table = [["", *[name if name == base else f"{name} (vs {base})" for name in runs]]]
    for title, value_of, show in _COMPARED:
        line = [title]
        for name, stats in runs.items():
            text = show(value_of(stats))
            line.append(text if name == base else f"{text} ({_change(value_of(runs[base]), value_of(stats))})")
        table.append(line)
    return columns(table)


def columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Its rows as lines, columns below each other."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _change(before: float, after: float) -> str:
    if before == after:
        return "same"
    return f"{after / before - 1:+.0%}" if before else "from 0"
