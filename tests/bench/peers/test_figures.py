"""Ratios, percentiles and sentences of known runs."""

import dataclasses

import pytest

from jcb.bench.peers import figures
from jcb.bench.peers.figures import Spread
from tests.bench.peers.runs import TINY, run_of

RUNS = [
    run_of("jcb", 100, 0), run_of("fast", 80, 0), run_of("slow", 10, 0),
    run_of("jcb", 300, 1), run_of("fast", 100, 1), run_of("slow", 30, 1),
    run_of("jcb", 90, 2), run_of("fast", 60, 2),
]  # fmt: skip


def of(peer):
    return figures.of_cell(RUNS, TINY, peer)


def test_rates_are_medians_with_minimum_and_maximum():
    assert figures.rates(RUNS, TINY, "jcb") == Spread(pytest.approx(100), pytest.approx(90), pytest.approx(300))
    assert figures.rates(RUNS, TINY, "nobody") is None


def test_ratios_are_taken_repeat_by_repeat():
    assert figures.ratio(of("jcb"), of("fast")) == Spread(pytest.approx(1.5), pytest.approx(1.25), pytest.approx(3.0))
    assert figures.ratio(of("jcb"), of("slow")) == Spread(pytest.approx(10), pytest.approx(10), pytest.approx(10))
    assert figures.ratio(of("jcb"), []) is None


def test_tokens_that_never_came_do_not_count():
    short = run_of("jcb", 100, counts=[50, 10])
    assert short.rate == pytest.approx(60)


def test_the_best_peer_is_named():
    assert figures.best(RUNS, TINY, ["fast", "slow"]) == "fast"
    assert figures.best(RUNS, TINY, []) is None


def test_latencies_are_of_all_repeats_together():
    found = figures.latency(RUNS, TINY, "slow")
    assert found == {
        "ttft_p50": pytest.approx(200),
        "ttft_p99": pytest.approx(300),
        "itl_p50": pytest.approx(20),
        "itl_p99": pytest.approx(30),
    }


def test_sentences_name_rate_ratio_and_the_cost_of_http():
    (sentence,) = figures.sentences(RUNS, ["jcb"])
    assert sentence == ("4 in / 3 out, 2 requests: jcb writes 100 tokens/s, 1.50 (1.25 to 3.00) × the best peer, fast.")
    web = dataclasses.replace(TINY, name="http-tiny", http=True)
    runs = [run_of("jcb", 90, cell=web, through="http"), run_of("jcb", 100, cell=web)]
    (sentence,) = figures.sentences(runs, ["jcb"])
    assert sentence == (
        "HTTP, 4 in / 3 out, 2 requests: jcb writes 90 tokens/s, 0.90 (0.90 to 0.90) × its own engine without HTTP."
    )


def test_a_run_as_data():
    data = figures.as_json(RUNS[0])
    assert data["tokens_per_second"] == pytest.approx(100)
    assert (data["tokens_asked"], data["tokens_written"]) == (100, 100)
    assert data["copy_bytes_per_second"] == 10e9
    assert data["itl_p99"] == pytest.approx(29.8)
