"""When requests are due: rates, shapes of the gaps, ramps."""

import math

import numpy as np
import pytest

from jcb.bench.serving.arrivals import Arrivals


def test_all_at_once_by_default():
    assert Arrivals().offsets(5, seed=0).tolist() == [0] * 5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_the_rate_asked_for_is_the_rate_sent(burstiness):
    offsets = Arrivals(20.0, burstiness).offsets(2000, seed=3)
    assert offsets[-1] == pytest.approx(100.0)
    gaps = np.diff(offsets)
    assert (gaps >= 0).all()
    expected = 0 if math.isinf(burstiness) else burstiness**-0.5  # of a gamma distribution
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.15, abs=1e-9)


def test_a_seed_repeats_and_another_does_not():
    pattern = Arrivals(5.0)
    assert pattern.offsets(9, seed=1).tolist() == pattern.offsets(9, seed=1).tolist()
    assert pattern.offsets(9, seed=1).tolist() != pattern.offsets(9, seed=2).tolist()


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 5.5), ("exponential", 10**0.5)])
def test_a_ramp_goes_from_one_rate_to_the_other(ramp, middle):
    pattern = Arrivals(burstiness=math.inf, ramp=ramp, ramp_start=1.0, ramp_end=10.0)
    rates = 1 / np.diff(pattern.offsets(101, seed=0), prepend=0)
    assert rates[[0, 50, 100]].tolist() == pytest.approx([1.0, middle, 10.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 0.0}, "--request-rate 0.0"),
        ({"rate": math.nan}, "--request-rate nan"),
        ({"burstiness": 0.0}, "--burstiness 0.0"),
        ({"ramp_start": 1.0}, "need --ramp-up-strategy"),
        ({"ramp": "linear", "ramp_start": 1.0}, "above 0"),
        ({"ramp": "linear", "ramp_start": 1.0, "ramp_end": 2.0, "rate": 3.0}, "no --request-rate"),
    ],
)
def test_impossible_patterns_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Arrivals(**fields)
