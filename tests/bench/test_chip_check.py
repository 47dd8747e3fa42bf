"""The script for rented chips, run whole on small shapes of this machine."""

import json

import pytest

from jcb.bench import chip_check
from jcb.bench.roofline import Roofline
from pallas_kernels import native
from pallas_kernels.kv_write import cases as write_cases
from pallas_kernels.paged_attention import cases


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(cases, "CASES", tuple(c for c in cases.CASES if c.name in ("decode_one", "mixed_sinks_window")))
    monkeypatch.setattr(write_cases, "CASES", write_cases.CASES[:2])
    monkeypatch.setattr(chip_check, "STEPS", 4)
    monkeypatch.setattr(chip_check, "measure_roofline", lambda dtype: Roofline("cpu: test", dtype, 1e10, 1e11))


def test_all_three_parts_run_and_give_figures(few_cases, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert chip_check.main(["--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["wrong"] == []
    assert [step["rows"] for step in document["steps"]] == [2, 8]
    assert all(step["milliseconds"] > 0 < step["percent_of_floor"] for step in document["steps"])
    assert {row["implementation"] for row in document["attention"]} == (
        {"cpu", "xla"} if native.available() else {"xla"}
    )
    assert "attention decode_one" in capsys.readouterr().out


def test_a_wrong_kernel_is_named(few_cases, monkeypatch, capsys):
    real = chip_check._difference
    monkeypatch.setattr(
        chip_check, "_difference", lambda call, name, **options: real(call, name, **options) + (name in ("cpu", "xla"))
    )
    assert chip_check.check_cases() == [
        "attention decode_one", "attention mixed_sinks_window", "kv_write decode", "kv_write decode_padded"
    ]  # fmt: skip
    assert "WRONG" in capsys.readouterr().out
