"""The cells: the requests of the benchmark, the same for every peer."""

import pytest

from jcb.bench.peers.cells import CELLS, QUICK, chosen


def test_fixed_cells_ask_for_what_their_name_says():
    jobs = CELLS["512-64-8"].jobs()
    assert {(len(job["prompt"]), job["output"], job["at"]) for job in jobs} == {(512, 64, 0.0)}
    assert len(jobs) == 8
    assert len({tuple(job["prompt"]) for job in jobs}) == 8, "a shared prompt would be served from a prefix cache"
    assert jobs == CELLS["512-64-8"].jobs() != CELLS["512-64-8"].jobs(seed=1)


def test_the_mix_has_many_lengths_and_poisson_arrivals():
    cell = CELLS["mix"]
    jobs = cell.jobs()
    inputs, outputs = [len(job["prompt"]) for job in jobs], [job["output"] for job in jobs]
    assert min(inputs) >= 16
    assert max(inputs) <= 512
    assert len(set(inputs)) > 40
    assert min(outputs) >= 8
    assert max(outputs) <= 256
    assert 40 < sum(outputs) / len(outputs) < 90
    assert jobs[-1]["at"] == pytest.approx(cell.requests / cell.rate)
    assert all(len(job["prompt"]) + job["output"] <= cell.longest for job in jobs)


def test_a_warm_up_has_the_lengths_of_the_prompts_but_short_answers():
    jobs = CELLS["512-64-8"].warm_up()
    assert {(len(job["prompt"]), job["output"], job["at"]) for job in jobs} == {(512, 4, 0.0)}


def test_cells_are_chosen_by_name():
    assert [cell.name for cell in chosen(CELLS, ["mix", "128-32-1"], 2.5)] == ["mix", "128-32-1"]
    assert chosen(CELLS, ["mix"], 2.5)[0].rate == 2.5
    assert chosen(CELLS, ["128-32-1"], 2.5)[0].rate is None
    assert chosen(QUICK, [], None) == list(QUICK.values())
    with pytest.raises(ValueError, match="'129' is not one of 128-32-1, "):
        chosen(CELLS, ["129"], None)


def test_titles_say_what_is_asked():
    assert CELLS["128-32-1"].title == "128 in / 32 out, 1 request"
    assert CELLS["http-mix"].title == "HTTP, mixed lengths, 64 requests at 1/s"
