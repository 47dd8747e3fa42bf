"""What must hold of throughput over the batch."""

import itertools

import pytest

from jcb.bench.experiments import why_batch
from jcb.bench.experiments.sim_lab import SimLab
from jcb.bench.experiments.why_batch import Sizes
from jcb.chips import chip_named
from jcb.models.presets import preset

SMALL = Sizes(batches=(1, 2, 8, 64, 256), contexts=(64,), answer=12)


@pytest.fixture(scope="module")
def study(lab):
    return why_batch.run(lab, SMALL)


def test_more_sequences_write_more_and_no_step_gets_shorter(study):
    for small, large in itertools.pairwise(study.data["cells"]):
        assert large["tokens_per_second"] > small["tokens_per_second"]
        assert large["step"] >= small["step"]


def test_no_point_is_above_the_limits(study):
    limits = study.data["limits"]
    for cell in study.data["cells"]:
        assert cell["tokens_per_second"] <= min(cell["batch"] / limits["weights_seconds"], 1 / limits["token_seconds"])
    first = study.data["cells"][0]
    assert first["tokens_per_second"] == pytest.approx(1 / limits["weights_seconds"], rel=0.02)


def test_the_ridge_is_flops_over_bandwidth(study):
    # 2 bytes a weight and 2 operations: shares of 60 % and 85 % of 989 TFLOP/s and 4.8 TB/s
    assert study.data["limits"]["ridge"] == pytest.approx(0.6 * 989e12 / (0.85 * 4.8e12))
    assert "arithmetic takes over only at 145 sequences" in study.finding


def test_batches_that_do_not_fit_the_chip_are_left_out():
    v6e = SimLab("Llama-3.1-8B", preset("llama-3.1-8b"), chip_named("v6e"))
    study = why_batch.run(v6e, Sizes(batches=(1, 64, 128), contexts=(1024,), answer=24, budget=32_768))
    assert [cell["batch"] for cell in study.data["cells"]] == [1, 64]


def test_a_burst_that_never_decodes_together_is_refused(lab):
    with pytest.raises(ValueError, match="end before the last begin"):
        why_batch.run(lab, Sizes(batches=(32,), contexts=(256,), answer=4, budget=256))
