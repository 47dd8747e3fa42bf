"""The table of published results."""

import json

import pytest

from jcb.bench.experiments import long_prompt, memory, published, static_vs_continuous
from jcb.bench.experiments.published import NOT_MEASURED, Capacity, Sizes, _capacity, _measured

SMALL = Sizes(
    static=static_vs_continuous.Sizes(slots=8, requests=40, prompt=32, mean=40),
    paging=memory.Sizes(
        pool=4096, longest=512, requests=60, slots=60, prompt="exponential(40)", output="exponential(80)"
    ),
    long=long_prompt.Sizes(users=6, context=256, prompt=3000, answer=80, budgets=(256,), pool=None),
    capacity=Capacity(requests=30, prompt="1500", output="40", longest=2048, slots=16, chunk=128, rounds=5),
)


@pytest.fixture(scope="module")
def rows(lab):
    return published.run(lab, SMALL).data["rows"]


def test_every_row_names_a_source_and_a_difference(rows):
    assert len(rows) == 5
    assert all(row["source"] and row["paper"] and row["difference"] and row["simulated"] for row in rows)
    assert all(row["ratio"] > 1 for row in rows)
    assert {row["measured"] for row in rows} == {NOT_MEASURED}


def test_what_was_measured_is_shown(lab, tmp_path):
    study = static_vs_continuous.run(lab, SMALL.static)
    path = study.write(tmp_path)
    path.rename(tmp_path / "static-vs-continuous-real.json")
    data = _measured(str(tmp_path), "static-vs-continuous")
    assert data == json.loads(json.dumps(study.data))
    row = published._batching(study.data, data)
    assert row["measured"] == row["simulated"] != NOT_MEASURED
    assert _measured(str(tmp_path), "memory") is None
    assert _measured("", "static-vs-continuous") is None


def test_chunks_raise_the_rate_that_keeps_to_the_limit(lab):
    whole, chunked = (_capacity(lab, SMALL.capacity, budget) for budget in (2048, 128))
    assert chunked > whole > 0
