"""The command's half without compilers: what is missing, wrong or does not fit is said before and after compiling."""

import dataclasses
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from jcb import cli
from jcb.aot import preflight, table
from jcb.aot.protocol import Plan, Row, decode, encode
from jcb.chips import CHIPS, parse_topology
from jcb.config import ServeConfig

PLAN = Plan(
    devices=1, dtype="bfloat16", page_size=128, num_pages=100, max_model_len=2048, max_num_seqs=64,
    weights=1 << 30, pages=2 << 30, memory=CHIPS["v5e"].memory, names=("decode 2", "decode 8"),
)  # fmt: skip
ROW = Row(
    name="decode 2", seconds=2.5, argument_bytes=3 << 30, alias_bytes=2 << 30, temp_bytes=5 << 20, code_bytes=1 << 20,
    output_bytes=2 << 30, flops=1e9, bytes_accessed=2.2e9, floor_bytes=2_000_000_000, floor_seconds=0.00244,
)  # fmt: skip


def test_messages_survive_the_pipe_and_a_compilers_chatter_is_ignored():
    for message in (PLAN, ROW, Row(name="x", error='says "no"\nand more')):
        assert decode(encode(message)) == message
        assert "\n" not in encode(message)
    assert decode("W0000 some compiler's warning {}") is None


def test_needed_memory_counts_what_is_not_aliased():
    assert ROW.needed_bytes == (3 << 30) + (5 << 20) + (1 << 20)
    assert replace(ROW, weights_beside=7).needed_bytes == ROW.needed_bytes + 7
    assert ROW.over_floor == pytest.approx(1.1)
    assert Row(name="init").over_floor == 0.0


def test_problems_name_the_program_and_the_limit():
    topology = parse_topology("v5e")
    good = preflight.Report(topology, PLAN, (ROW,))
    assert good.problems == []
    big = dataclasses.replace(ROW, name="prefill 512 x 8", temp_bytes=20 << 30)
    broken = Row(name="decode 8", error="RESOURCE_EXHAUSTED: scoped vmem limit exceeded")
    bad = preflight.Report(topology, PLAN, (ROW, big, broken))
    assert bad.problems == [
        "decode 8: RESOURCE_EXHAUSTED: scoped vmem limit exceeded",
        "prefill 512 x 8: needs 23.00 GiB, TPU v5e has 15.75",
    ]


def test_the_table_and_the_json_say_the_same(capsys):
    report = preflight.Report(parse_topology("v5e"), PLAN, (ROW, Row(name="decode 8", error="does not compile")))
    table.show(report, Console(width=140, force_terminal=False))
    shown = capsys.readouterr().out
    for part in ("TPU v5e (v5e:1x1, 1 of 1 devices)", "decode 2", "1.10", "2.44", "fails decode 8: does not compile"):
        assert part in shown
    parsed = json.loads(table.to_json(report))
    assert parsed["fits"] is False
    assert parsed["programs"][0]["over_floor"] == pytest.approx(1.1)
    assert parsed["problems"] == ["decode 8: does not compile"]


def test_missing_compilers_are_named_with_the_command_that_installs_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ValueError, match=r"TPU v6e is not installed \(no libtpu in .*\): run `make install-aot`"):
        preflight.environment(CHIPS["v6e"], {})
    (tmp_path / "aot" / "libtpu").mkdir(parents=True)
    env = preflight.environment(CHIPS["v6e"], {"PYTHONPATH": "mine", "HOME": "h"})
    assert env["PYTHONPATH"].split(":")[0] == str(tmp_path / "aot")
    assert env["PYTHONPATH"].split(":")[-1] == "mine"
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["TPU_SKIP_MDS_QUERY"] == "1"
    assert env["HOME"] == "h"
    assert env["LIBTPU_INIT_ARGS"] == "--xla_tpu_impure_enable_large_2nd_minor_layout=false"
    own = preflight.environment(CHIPS["v6e"], {"LIBTPU_INIT_ARGS": "--mine=1"})["LIBTPU_INIT_ARGS"]
    assert own.split()[1:] == ["--mine=1"]
    with pytest.raises(ValueError, match="H200 141GB HBM3e is not installed"):
        preflight.environment(CHIPS["h200"], {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9"], "no chip 'v9'"),
        (["--topology", "h200", "--model", "preset:none"], "no preset 'none'"),
        (["--topology", "h200", "--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_the_command_refuses_bad_arguments_at_once(arguments, message, capsys):
    assert cli.main(["aot", *arguments]) == 2
    assert message in capsys.readouterr().err


def stand_in(tmp_path, monkeypatch, script: str) -> None:
    """The child process runs `script` instead of the worker."""
    (tmp_path / "aot" / "libtpu").mkdir(parents=True)
    (tmp_path / "aot" / "stand_in.py").write_text(script)
    monkeypatch.setattr(preflight, "compilers", lambda: tmp_path / "aot")
    monkeypatch.setattr(preflight, "_WORKER", "stand_in")


def test_what_the_child_says_becomes_the_report(tmp_path, monkeypatch):
    lines = [encode(PLAN), "chatter", encode(ROW), encode(dataclasses.replace(ROW, name="decode 8"))]
    stand_in(tmp_path, monkeypatch, f"import sys; sys.stdin.read(); print({chr(10).join(lines)!r})")
    seen = []
    report = preflight.check(
        ServeConfig(model="preset:smollm2-135m"), parse_topology("v5e"), progress=lambda *step: seen.append(step)
    )
    assert report.plan == PLAN
    assert [row.name for row in report.rows] == ["decode 2", "decode 8"]
    assert seen == [("compile", 0, 2), ("compile", 1, 2), ("compile", 2, 2)]


def test_a_refused_setting_and_a_dead_child_are_told_apart(tmp_path, monkeypatch, capsys):
    stand_in(tmp_path, monkeypatch, "import sys; print('jcb: too large', file=sys.stderr); sys.exit(2)")
    config, topology = ServeConfig(model="preset:smollm2-135m"), parse_topology("v5e")
    with pytest.raises(ValueError, match=r"^too large$"):
        preflight.check(config, topology)
    (tmp_path / "aot" / "stand_in.py").write_text(
        "import sys; print('Fatal: out of luck', file=sys.stderr); sys.exit(9)"
    )
    with pytest.raises(ChildProcessError, match=r"(?s)status 9.*out of luck"):
        preflight.check(config, topology)
    assert cli.main(["aot", "--topology", "v5e", "--model", "preset:smollm2-135m"]) == 1
    assert "out of luck" in capsys.readouterr().err
