"""What must hold of the scheduling policies under overload."""

import pytest

from jcb.bench.experiments import policies
from jcb.bench.experiments.policies import BOUNDS, POLICIES, Sizes

SMALL = Sizes(requests=40, chat=40, document=1500, shared=600, own=40, answer=24, slots=6, budget=512, load=5.0)


@pytest.fixture(scope="module")
def waits(lab):
    study = policies.run(lab, SMALL)
    return {cell["policy"]: cell for cell in study.data["cells"]}


def test_every_policy_is_compared_and_has_its_bound_told(waits):
    assert list(waits) == list(POLICIES) == list(BOUNDS)
    assert all(cell["bound"] for cell in waits.values())


def test_first_come_first_served_makes_all_wait_alike(waits):
    fcfs = waits["fcfs"]["ttft"]
    assert fcfs["chat"]["p50"] == pytest.approx(fcfs["questions"]["p50"], rel=0.5)


@pytest.mark.parametrize("policy", ["priority", "shortest-prompt", "fair-share"])
def test_who_asks_for_little_waits_less(waits, policy):
    assert waits[policy]["ttft"]["chat"]["p50"] < 0.6 * waits["fcfs"]["ttft"]["chat"]["p50"]
    assert waits[policy]["ttft"]["documents"]["max"] >= waits["fcfs"]["ttft"]["documents"]["p50"]


def test_a_cached_prefix_goes_first(waits):
    assert waits["longest-prefix"]["ttft"]["questions"]["p50"] < waits["fcfs"]["ttft"]["questions"]["p50"]
    assert waits["longest-prefix"]["cached_tokens"] >= waits["fcfs"]["cached_tokens"]
