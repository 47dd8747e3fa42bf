"""`make bench-host`: an empty device gets real plans, every part of a step is counted, the queue is there."""

import json

import pytest

from jcb.bench import host
from jcb.bench.host import Bench, Parts
from jcb.steps.inputs import HEADER
from tests.fake_model import byte_tokenizer


def test_every_row_writes_a_token_in_every_step():
    bench = Bench(5, 3, byte_tokenizer(), steps=12)
    scheduler = bench.core.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (5, 3)
    before = bench.metrics.generation_tokens.value
    parts = bench.block(4)
    assert bench.metrics.generation_tokens.value == before + 5 * 4
    assert min(parts.plan, parts.pack, parts.unpack, parts.text) > 0
    assert parts.total == pytest.approx(parts.plan + parts.pack + parts.unpack + parts.text)
    scheduler.check_integrity()


def test_the_empty_device_packs_what_it_is_given():
    bench = Bench(3, 0, steps=4)
    plan = bench.core.scheduler.schedule(0.0)
    packed = bench.device.pack(plan)
    assert packed[0] == 3
    assert packed.size > HEADER
    result = bench.device.collect(plan)
    assert result.token_ids.tolist() == [65] * 3
    assert result.finite.all()


def test_lines_have_medians_and_the_ceiling_leaves_text_out():
    parts = [Parts(10, 20, 5, 100), Parts(30, 40, 5, 300), Parts(20, 30, 5, 200)]
    line = host.line_of(64, 7, parts)
    assert line.parts == Parts(20, 30, 5, 200)
    assert (line.least, line.most) == (135, 375)
    assert line.tokens_per_second == pytest.approx(64 / 55e-6)
    assert host.table([line])[1].split()[:2] == ["64", "7"]


def test_prints_both_tables_and_writes_json(tmp_path, capsys):
    path = tmp_path / "host.json"
    flags = ["--rows", "2", "4", "--waiting", "3", "6", "--blocks", "2", "--steps", "2", "--no-model"]
    assert host.main([*flags, "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "the host's ceiling at 4 rows" in printed
    assert "6 waiting cost" in printed
    document = json.loads(path.read_text())
    assert [(line["rows"], line["waiting"]) for line in document["empty"]] == [(2, 0), (4, 0), (4, 3), (4, 6)]
    assert document["growth"] > 0
