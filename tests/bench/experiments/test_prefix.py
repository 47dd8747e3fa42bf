"""What must hold of the prefix cache."""

import pytest

from jcb.bench.experiments import prefix
from jcb.bench.experiments.prefix import Sizes, _pairs

SMALL = Sizes(users=6, requests=30, system=512, groups=2, own=48, answer=20, turns=3, budget=512)


@pytest.fixture(scope="module")
def study(lab):
    return prefix.run(lab, SMALL)


def test_the_cache_is_never_slower(study):
    for off, on in _pairs(study.data):
        assert (off["cached"], on["cached"]) == (False, True)
        assert off["hit_share"] == 0
        assert on["tokens_per_second"] >= 0.999 * off["tokens_per_second"]
        assert on["ttft_p50"] <= 1.001 * off["ttft_p50"]


def test_hits_are_what_the_workload_shares(study):
    system, talks, nothing = (on for _, on in _pairs(study.data))
    shared = 512 / (512 + 48)
    assert shared * (1 - 6 / 30) <= system["hit_share"] <= shared  # the first of each user may come too early
    assert talks["hit_share"] > 0.3
    assert nothing["hit_share"] == 0
    assert system["tokens_per_second"] > 1.2 * study.data["cells"][0]["tokens_per_second"]
