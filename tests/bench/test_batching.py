"""The arithmetic and the picture of the batching benchmark; the benchmark itself is `make bench-batching`."""

from jcb.bench.batching import Cell, exponential_lengths, ratios, show
from jcb.bench.batching_picture import draw


def cell(mode: str, workload: str, seconds: float) -> Cell:
    return Cell(mode, workload, seconds, tokens=100, latencies=[seconds / 2, seconds])


CELLS = [
    cell("paged", "exponential lengths", 2.0),
    cell("static", "exponential lengths", 4.0),
    cell("static", "exponential lengths", 6.0),
    cell("paged", "exponential lengths", 2.0),
    cell("paged", "constant lengths", 2.0),
    cell("static", "constant lengths", 2.0),
]


def test_lengths_are_clipped_and_repeatable():
    lengths = exponential_lengths(4000, seed=7)
    assert lengths == exponential_lengths(4000, seed=7) != exponential_lengths(4000, seed=8)
    assert (min(lengths), max(lengths)) == (8, 256)
    assert 55 < sum(lengths) / len(lengths) < 70


def test_ratios_pair_runs_in_order():
    assert ratios(CELLS, "exponential lengths") == [2.0, 3.0]
    assert ratios(CELLS, "constant lengths") == [1.0]
    assert show("gain", [2.0, 3.0]) == "gain: 2.50 x (min 2.00, max 3.00)"


def test_the_picture_is_a_png(tmp_path):
    cells = [
        {"mode": c.mode, "workload": c.workload, "rate": c.rate, "latencies": c.latencies, "seconds": c.seconds}
        for c in CELLS
    ]
    draw(cells, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
