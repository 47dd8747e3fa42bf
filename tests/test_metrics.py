"""Counters that only grow, gauges that are never negative, histograms that add up."""

import math

import pytest

from jcb.metrics import Counter, EngineMetrics, Gauge, Histogram


def test_a_counter_never_falls():
    counter = Counter()
    for amount in (1, 2.5, -4, math.nan, math.inf, -math.inf):
        counter.inc(amount, label="word")
    assert counter.value == 3.5
    assert counter.by_label == {"word": 3.5}
    counter.raise_to(2)
    assert counter.value == 3.5
    counter.raise_to(10)
    assert counter.value == 10


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_a_gauge_is_a_number_of_at_least_0(value):
    gauge = Gauge(3)
    gauge.set(value)
    assert gauge.value == 0


def test_a_histogram_puts_a_value_under_the_first_bound_that_holds_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0, -1.0, math.nan):
        histogram.observe(value)
    histogram.observe(1.5, times=3)
    assert histogram.cumulative() == [("1.0", 4), ("2.0", 9), ("+Inf", 10)]
    assert histogram.count == 10
    assert histogram.total == 0.5 + 1.0 + 1.5 + 2.0 + 99.0 + 4.5


def test_the_bounds_ascend():
    metrics = EngineMetrics()
    for name in metrics.__slots__:
        metric = getattr(metrics, name)
        if isinstance(metric, Histogram):
            assert list(metric.bounds) == sorted(set(metric.bounds)), name


def test_every_number_is_exported():
    from jcb.server.metrics import _FIELDS

    metrics = EngineMetrics()
    numbers = {n for n in metrics.__slots__ if isinstance(getattr(metrics, n), Counter | Gauge | Histogram)}
    assert set(_FIELDS) == numbers
