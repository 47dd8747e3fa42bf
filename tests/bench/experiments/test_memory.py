"""What must hold of memory reserved and memory by pages."""

import itertools

import pytest

from jcb.bench.experiments import memory
from jcb.bench.experiments.memory import Sizes

SMALL = Sizes(
    pool=4096, longest=512, requests=60, slots=60, prompt="exponential(40)", output="exponential(80)",
    means=(64, 188, 700, 1588), crowd=12,
)  # fmt: skip


@pytest.fixture(scope="module")
def study(lab):
    return memory.run(lab, SMALL)


def test_pages_admit_more_and_waste_less_than_reservations(study):
    longest, oracle, pages = study.data["cells"]
    assert longest["unused"] > oracle["unused"] > pages["unused"] > 0
    assert longest["admitted"] < oracle["admitted"] < pages["admitted"]
    assert longest["tokens_per_second"] < oracle["tokens_per_second"] < pages["tokens_per_second"]
    assert longest["unused"] > 0.5
    assert pages["unused"] < 0.2  # half a page of 16, and rows that wait for a page, of about 80 tokens
    assert longest["admitted"] <= 4096 / 512


def test_waste_falls_with_length_and_grows_with_the_page(study):
    for page in SMALL.pages:
        waste = [point["per_token"] for point in study.data["curve"] if point["page"] == page]
        assert all(later < earlier for earlier, later in itertools.pairwise(waste))
    for mean in range(len(SMALL.means)):
        by_page = [study.data["curve"][page * len(SMALL.means) + mean]["per_token"] for page in range(3)]
        assert by_page == sorted(by_page)


def test_waste_is_half_a_page_a_sequence(study):
    for point in study.data["curve"]:
        if point["length"] > 2 * point["page"]:
            assert point["per_token"] == pytest.approx((point["page"] - 1) / 2 / point["length"], rel=0.35)


def test_the_lengths_that_the_papers_figure_needs(study):
    assert study.data["needed"] == {"16": 188, "64": 788, "128": 1588}
    assert "188 at page 16, 788 at page 64, 1,588 at page 128" in study.finding
