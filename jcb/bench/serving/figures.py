"""From outcomes to figures: the keys of vLLM's result file and the lines that it prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcb.bench.serving.client import Outcome

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}
"""Metric → its name in a line, and the heading above."""

DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
           "generated_texts", "errors")  # fmt: skip
"""Keys with one entry a request, kept with --save-detailed only."""

GOALS = ("ttft", "tpot", "e2el")
_WIDTH = 50


@dataclass(frozen=True)
class Wanted:
    """What is asked of the figures. metrics: keys of TITLES. goodput: most milliseconds by metric."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def parse(metrics: str, percentiles: str, goodput: Sequence[str]) -> Wanted:
        """From the texts of --percentile-metrics, --metric-percentiles and --goodput. ValueError names a bad one."""
        names = tuple(name.strip() for name in metrics.split(","))
        if unknown := [name for name in names if name not in TITLES]:
            raise ValueError(f"--percentile-metrics {unknown[0]!r} is not one of {', '.join(TITLES)}")
        try:
            parts = tuple(float(part) for part in percentiles.split(","))
        except ValueError as error:
            raise ValueError(f"--metric-percentiles {percentiles!r} must be numbers with commas between") from error
        if not all(0 <= part <= 100 for part in parts):
            raise ValueError(f"--metric-percentiles {percentiles!r} must be between 0 and 100")
        return Wanted(names, parts, tuple(_goal(text) for text in goodput))


def _goal(text: str) -> tuple[str, float]:
    """A goal such as "ttft:500"."""
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if name not in GOALS or not limit >= 0:
        raise ValueError(f"--goodput {text!r} must be {', '.join(GOALS)}, a colon and milliseconds, as in ttft:500")
    return name, limit


def tpot_of(outcome: Outcome) -> float:
    """Seconds a token after the first; 0 where there was one token only."""
    return (outcome.latency - outcome.ttft) / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else 0.0


def figures(outcomes: Sequence[Outcome], seconds: float, wanted: Wanted) -> dict[str, Any]:
    """Every figure of a run of `seconds` under vLLM's keys, the details of DETAILS included.

    Failed requests count in "failed" and nowhere else.
    """
    good = [outcome for outcome in outcomes if outcome.is_success]
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "request_goodput": _good_enough(good, wanted) / seconds if wanted.goodput else None,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "max_output_tokens_per_s": peak_tokens(good),
        "max_concurrent_requests": peak_requests(good),
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens if o.is_success else 0 for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "queue_times": [o.queued for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }
    values = {
        "ttft": [o.ttft for o in good],
        "tpot": [tpot_of(o) for o in good if o.output_tokens > 1],
        "itl": [gap for o in good for gap in o.itls],
        "e2el": [o.latency for o in good],
        "client_queue_time": [o.queued for o in good],
    }
    for name in wanted.metrics:
        result |= statistics_of(name, values[name], wanted.percentiles)
    return result


def statistics_of(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean_, median_, std_ and pXX_ of one metric in milliseconds; 0 where there is nothing to tell of."""
    data = np.array(seconds if len(seconds) else [0.0]) * 1000
    result = {"mean": data.mean(), "median": np.median(data), "std": data.std()}
    result |= {f"p{percentile:g}": np.percentile(data, percentile) for percentile in percentiles}
    return {f"{key}_{name}_ms": float(value) for key, value in result.items()}


def _good_enough(good: Sequence[Outcome], wanted: Wanted) -> int:
    """Requests that met every goal."""
    seconds = {"ttft": lambda o: o.ttft, "tpot": tpot_of, "e2el": lambda o: o.latency}
    return sum(all(seconds[name](o) * 1000 <= limit for name, limit in wanted.goodput) for o in good)


def peak_tokens(good: Sequence[Outcome]) -> float:
    """Most events with text in one second, seconds counted from the first request."""
    begin = min((o.start for o in good), default=0.0)
    seconds: Counter[int] = Counter()
    for outcome in good:
        when = outcome.start - begin + outcome.ttft
        seconds[int(when)] += 1
        for gap in outcome.itls:
            when += gap
            seconds[int(when)] += 1
    return float(max(seconds.values(), default=0))


def peak_requests(good: Sequence[Outcome]) -> int:
    """Most requests that were under way at one moment."""
    changes = sorted([(o.start, 1) for o in good] + [(o.start + o.latency, -1) for o in good])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def lines(
    result: dict[str, Any], wanted: Wanted, *, rate: float = math.inf, max_concurrency: int | None = None
) -> Iterator[str]:
    """The block that vLLM's benchmark prints."""
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    if max_concurrency is not None:
        yield _line("Maximum request concurrency:", max_concurrency)
    if not math.isinf(rate):
        yield _line("Request rate configured (RPS):", float(rate))
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    if wanted.goodput:
        yield _line("Request goodput (req/s):", result["request_goodput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])
    for name in wanted.metrics:
        short, heading = TITLES[name]
        yield f"{heading:-^{_WIDTH}}"
        for key, word in [("mean", "Mean"), ("median", "Median")] + [
            (f"p{percentile:g}", f"P{percentile:g}") for percentile in wanted.percentiles
        ]:
            yield _line(f"{word} {short} (ms):", result[f"{key}_{name}_ms"])
    yield "=" * _WIDTH


def _line(name: str, value: float) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"


def error_lines(result: dict[str, Any]) -> Iterator[str]:
    """Every kind of failure with its number, the most frequent first."""
    for error, count in Counter(filter(None, result["errors"])).most_common():
        yield f"{count} failed: {error}"
