"""The front of the knobs' grid."""

from jcb.bench.experiments import knobs
from jcb.bench.experiments.knobs import Sizes, front


def cell(ttft, tpot, rate):
    return {"ttft": ttft, "tpot": tpot, "tokens_per_second": rate}


def test_the_front_holds_what_nothing_beats():
    cells = [cell(1, 3, 10), cell(2, 2, 10), cell(3, 3, 10), cell(9, 9, 11), cell(2, 2, 10)]
    assert front(cells) == [True, True, False, True, True]


def test_the_grid_has_every_legal_setting_once(lab):
    sizes = Sizes(seqs=(2, 8), budgets=(4, 64), policies=("fcfs",), requests=12, prompt="40", output="10", longest=256)
    study = knobs.run(lab, sizes)
    found = [(each["max_num_seqs"], each["max_num_batched_tokens"]) for each in study.data["cells"]]
    assert found == [(2, 4), (2, 64), (8, 64)]
    assert any(each["on_front"] for each in study.data["cells"])
