"""What must hold of static against continuous batching."""

import itertools

import pytest

from jcb.bench.experiments import static_vs_continuous
from jcb.bench.experiments.static_vs_continuous import LENGTHS, Sizes

SMALL = Sizes(slots=8, requests=40, prompt=32, mean=40)


@pytest.fixture(scope="module")
def study(lab):
    return static_vs_continuous.run(lab, SMALL)


def test_with_equal_lengths_nobody_waits(study):
    assert study.data["gains"]["constant"]["paged"] == pytest.approx(1, abs=0.05)
    assert study.data["gains"]["constant"]["reserve"] == pytest.approx(1, abs=0.05)


def test_the_gain_grows_with_the_spread(study):
    gains = [study.data["gains"][lengths]["paged"] for lengths in LENGTHS]
    assert gains == sorted(gains)
    assert gains[-2] > 1.5
    assert all(study.data["gains"][lengths]["reserve"] <= study.data["gains"][lengths]["paged"] for lengths in LENGTHS)


def test_every_mode_writes_the_same_tokens(study):
    for lengths in LENGTHS:
        assert len({cell["output_tokens"] for cell in study.data["cells"] if cell["lengths"] == lengths}) == 1
    assert all(0 < cell["slot_use"] <= 1 for cell in study.data["cells"])
    assert all(len(cell["latencies"]) == SMALL.requests for cell in study.data["cells"])


def test_a_slot_holds_one_request_at_a_time(study):
    spans = sorted(study.data["timelines"]["static"], key=lambda span: (span[0], span[2]))
    assert {number for _, number, _, _ in spans} == set(range(SMALL.requests))
    for (slot, _, _, end), (next_slot, _, begin, _) in itertools.pairwise(spans):
        assert slot != next_slot or begin >= end


def test_the_same_seed_gives_the_same_study(study, lab):
    assert static_vs_continuous.run(lab, SMALL) == study
