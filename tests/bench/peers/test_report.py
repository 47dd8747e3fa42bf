"""Tables, JSON and the picture of known findings."""

import io
import json

from rich.console import Console

from jcb.bench.peers import report
from jcb.bench.peers.picture import draw
from jcb.bench.peers.run import Findings
from tests.bench.peers.runs import MIX, run_of

RUNS = [run_of(peer, rate, repeat) for repeat in (0, 1) for peer, rate in (("jcb", 100), ("fast", 80))]
RUNS += [run_of("jcb", 50, cell=MIX)]
FINDINGS = Findings(
    runs=RUNS,
    told={
        "jcb": {"versions": {"jcb": "0.1.0", "jax": "0.12"}, "precision": "float32", "load_seconds": 3.2},
        "fast": {"versions": {"fast": "9"}, "precision": "u8", "load_seconds": 1.0},
    },
    samples={"jcb": [5, 6, 7], "fast": [5, 6, 8]},
    failures={"odd": "it was ended by SIGILL"},
)


def text():
    console = Console(file=io.StringIO(), width=200)
    report.show(FINDINGS, ["jcb"], console)
    return console.file.getvalue()


def test_tables_tell_who_ran_who_failed_and_how_fast():
    shown = text()
    for part in (
        "jcb 0.1.0, jax 0.12", "2 of 3 equal", "failed: it was ended by SIGILL", "100 (100 to 100)", "jcb / fast",
        "1.25 (1.25 to 1.25)", "ITL p99", "copy 10.0 (10.0 to 10.0) GB/s", "the best peer, fast.",
    ):  # fmt: skip
        assert part in shown, part


def test_tables_without_anything_to_tell_are_left_out():
    console = Console(file=io.StringIO(), width=200)
    report.show(Findings(runs=[run_of("fast", 80)]), ["jcb"], console)
    shown = console.file.getvalue()
    assert "output tokens a second" in shown
    assert "ratios" not in shown
    assert "TTFT" not in shown


def test_the_json_holds_every_number():
    data = json.loads(json.dumps(report.as_json(FINDINGS, ["jcb"])))
    assert len(data["runs"]) == 5
    assert data["failures"] == {"odd": "it was ended by SIGILL"}
    assert data["ratios"] == [{"cell": "tiny", "jcb": "jcb", "peer": "fast", "median": 1.25, "min": 1.25, "max": 1.25}]
    assert data["cells"]["mix"] == "mixed lengths, 3 requests at 100/s"


def test_nothing_ran_is_told_too():
    console = Console(file=io.StringIO(), width=100)
    report.show(Findings(failures={"odd": "not installed"}), ["jcb"], console)
    assert "failed: not installed" in console.file.getvalue()


def test_the_picture_is_a_png(tmp_path):
    draw(RUNS, tmp_path / "peers.png", note="copy 10 GB/s")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
