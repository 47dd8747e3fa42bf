"""`jcb bench kernels`: the floor's sums, one real measurement of a small shape, and the tuner's file."""

import json

import pytest

from jcb import cli
from jcb.bench import kernels
from pallas_kernels import native, tuning
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.cost import cost_of

SMALL = Case("small", ((1, 40), (1, 9)), num_layers=1, layer=0)


def test_cost_counts_live_tokens_and_causal_pairs():
    case = Case("hand", ((1, 10), (3, 5)), num_heads=4, kv_heads=2, head_dim=8)
    cost = cost_of(case)
    assert cost.nbytes == (10 + 5) * 2 * 2 * 8 * 4 + 2 * 4 * 4 * 8 * 4
    assert cost.flops == 4 * (10 + 3 + 4 + 5) * 4 * 8
    windowed = cost_of(Case("hand", ((1, 10), (3, 5)), num_heads=4, kv_heads=2, head_dim=8, sliding_window=2))
    assert windowed.nbytes == (2 + 4) * 2 * 2 * 8 * 4 + 2 * 4 * 4 * 8 * 4
    assert windowed.flops == 4 * (2 + 2 + 2 + 2) * 4 * 8
    assert cost.seconds(bandwidth=cost.nbytes / 2, flops=1e30) == 2.0


def test_cases_are_chosen_by_name_and_small_enough_for_a_cpu():
    assert [case.name for case in kernels.local_cases("chunk_2048")] == ["llama8b_chunk_2048"]
    assert all(cost_of(case).nbytes <= 64 << 20 for case in kernels.local_cases())
    with pytest.raises(ValueError, match="nothing_like_it"):
        kernels.local_cases("nothing_like_it")


def test_prints_a_table_and_writes_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "BENCH", (SMALL,))
    path = tmp_path / "out.json"
    assert cli.main(["bench", "kernels", "--repeat", "2", "--output", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "GB/s" in lines[0]
    expected = ["cpu", "xla"] if native.available() else ["xla"]
    assert [line.split()[:2] for line in lines[-len(expected) :]] == [["small", name] for name in expected]
    results = json.loads(path.read_text())["results"]
    assert [result["implementation"] for result in results] == expected
    for result in results:
        assert 0 < result["least"] <= result["microseconds"] <= result["most"]
        assert result["gigabytes_per_second"] == pytest.approx(cost_of(SMALL).nbytes / result["microseconds"] / 1e3)


def test_tuning_writes_the_fastest_sizes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "BENCH", (SMALL,))
    seconds = {8: 4e-6, 4: 1e-6}
    monkeypatch.setattr(
        kernels,
        "seconds_of",
        lambda case, name, *, repeat, blocks: [seconds.get(blocks.rows, 9e-6) + blocks.block_kv / 1e12],
    )
    path = tmp_path / "tuned.json"
    assert cli.main(["bench", "kernels", "--tune", "--repeat", "1", "--output", str(path)]) == 0
    (entry,) = json.loads(path.read_text())
    assert entry["blocks"] == {"rows": 4, "block_kv": 64}
    assert entry["microseconds"] < entry["untuned_microseconds"] == 4.0
    assert entry["device"] == tuning.device_kind("cpu")


def test_bad_flags_are_one_line(capsys):
    assert cli.main(["bench", "kernels", "--repeat", "0"]) == 2
    assert cli.main(["bench", "kernels", "--implementation", "tpu"]) == 2
    assert "cannot run here" in capsys.readouterr().err
    assert cli.main(["bench", "kernels", "--dtype", "float13"]) == 2
    assert "'float13' is not one of float32, bfloat16" in capsys.readouterr().err
