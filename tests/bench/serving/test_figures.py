"""The figures of known outcomes, vLLM's lines and keys, written down here from its source."""

import math

import pytest

from jcb.bench.serving.client import Outcome
from jcb.bench.serving.figures import Wanted, error_lines, figures, lines, peak_requests, peak_tokens, statistics_of

ALL = Wanted(("ttft", "tpot", "itl", "e2el"), (50.0, 99.0, 99.9), (("ttft", 150.0), ("tpot", 100.0)))

KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
    "generated_texts", "errors",
}  # fmt: skip
STATISTICS = {
    f"{word}_{name}_ms"
    for word in ("mean", "median", "std", "p50", "p99", "p99.9")
    for name in ("ttft", "tpot", "itl", "e2el")
}
LINES = [
    "============ Serving Benchmark Result ============",
    "Successful requests:                     2         ",
    "Failed requests:                         1         ",
    "Maximum request concurrency:             7         ",
    "Request rate configured (RPS):           1.50      ",
    "Benchmark duration (s):                  4.00      ",
    "Total input tokens:                      30        ",
    "Total generated tokens:                  4         ",
    "Request throughput (req/s):              0.50      ",
    "Request goodput (req/s):                 0.25      ",
    "Output token throughput (tok/s):         1.00      ",
    "Peak output token throughput (tok/s):    4.00      ",
    "Peak concurrent requests:                2.00      ",
    "Total token throughput (tok/s):          8.50      ",
    "---------------Time to First Token----------------",
    "Mean TTFT (ms):                          150.00    ",
    "Median TTFT (ms):                        150.00    ",
    "P50 TTFT (ms):                           150.00    ",
    "P99 TTFT (ms):                           199.00    ",
    "P99.9 TTFT (ms):                         199.90    ",
    "-----Time per Output Token (excl. 1st token)------",
    "Mean TPOT (ms):                          300.00    ",
    "Median TPOT (ms):                        300.00    ",
    "P50 TPOT (ms):                           300.00    ",
    "P99 TPOT (ms):                           300.00    ",
    "P99.9 TPOT (ms):                         300.00    ",
    "---------------Inter-token Latency----------------",
    "Mean ITL (ms):                           300.00    ",
    "Median ITL (ms):                         300.00    ",
    "P50 ITL (ms):                            300.00    ",
    "P99 ITL (ms):                            398.00    ",
    "P99.9 ITL (ms):                          399.80    ",
    "----------------End-to-end Latency----------------",
]


def outcomes():
    """One of three tokens, one of a single token, one that failed."""
    return [
        Outcome(start=10.0, ttft=0.2, latency=0.8, itls=[0.2, 0.4], prompt_tokens=10, output_tokens=3, text="a"),
        Outcome(start=10.5, ttft=0.1, latency=0.1, prompt_tokens=20, output_tokens=1, text="b", queued=0.25),
        Outcome(start=11.0, prompt_tokens=99, output_tokens=5, error="status 500: no"),
    ]


def test_keys():
    result = figures(outcomes(), 4.0, ALL)
    assert set(result) == KEYS | STATISTICS


def test_the_printed_block():
    printed = list(lines(figures(outcomes(), 4.0, ALL), ALL, rate=1.5, max_concurrency=7))
    assert printed[: len(LINES)] == LINES
    assert printed[-1] == "=" * 50


def test_lines_that_vllm_leaves_out_are_left_out():
    wanted = Wanted()
    printed = "\n".join(lines(figures(outcomes(), 4.0, wanted), wanted))
    for text in ("Maximum request", "Request rate", "goodput", "End-to-end", "P50"):
        assert text not in printed
    assert figures(outcomes(), 4.0, wanted)["request_goodput"] is None


def test_goodput_wants_every_goal():
    """The first misses both, the second has no time per token and counts as 0, the third failed."""
    for goals, good in [
        ((("ttft", 150.0),), 1),
        ((("ttft", 200.0),), 2),
        ((("tpot", 299.0),), 1),
        ((("e2el", 50.0),), 0),
    ]:
        assert figures(outcomes(), 4.0, Wanted(goodput=goals))["request_goodput"] == good / 4.0


def test_percentiles_of_known_data():
    data = [i / 1000 for i in range(1, 102)]
    found = statistics_of("ttft", data, (0.0, 25.0, 50.0, 99.0, 100.0))
    assert found["p0_ttft_ms"] == pytest.approx(1)
    assert found["p25_ttft_ms"] == pytest.approx(26)
    assert found["p50_ttft_ms"] == found["median_ttft_ms"] == found["mean_ttft_ms"] == pytest.approx(51)
    assert found["p99_ttft_ms"] == pytest.approx(100)
    assert found["p100_ttft_ms"] == pytest.approx(101)
    assert found["std_ttft_ms"] == pytest.approx(math.sqrt((101**2 - 1) / 12))
    assert set(statistics_of("itl", [], (99.0,)).values()) == {0.0}


def test_peaks():
    good = outcomes()[:2]
    assert peak_tokens(good) == 4  # 0.2, 0.4, 0.8 and 0.6 seconds after the first request
    assert peak_tokens([Outcome(start=0.0, ttft=0.9, itls=[0.2, 0.8, 0.3])]) == 2  # 0.9 | 1.1, 1.9 | 2.2
    assert peak_requests(good) == 2
    touching = [Outcome(start=0.0, latency=1.0), Outcome(start=1.0, latency=1.0)]
    assert peak_requests(touching) == 1
    assert (peak_requests([]), peak_tokens([])) == (0, 0)


def test_errors_are_counted_by_kind():
    result = {"errors": ["a", "", "b", "b"]}
    assert list(error_lines(result)) == ["2 failed: b", "1 failed: a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ttft,tbot", "99", ()), "'tbot' is not one of ttft"),
        (("ttft", "99,x", ()), "'99,x' must be numbers"),
        (("ttft", "101", ()), "between 0 and 100"),
        (("ttft", "99", ("ttft=3",)), "as in ttft:500"),
        (("ttft", "99", ("itl:3",)), "'itl:3' must be ttft"),
        (("ttft", "99", ("ttft:-1",)), "milliseconds"),
    ],
)
def test_what_is_wanted_must_make_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        Wanted.parse(*arguments)


def test_wanted_from_flags():
    wanted = Wanted.parse("ttft, e2el", "50,99.9", ("ttft:500", "e2el:2e3"))
    assert wanted == Wanted(("ttft", "e2el"), (50.0, 99.9), (("ttft", 500.0), ("e2el", 2000.0)))
