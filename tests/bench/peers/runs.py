"""Cells and runs that the tests of this folder share."""

from jcb.bench.peers.calibration import Moment
from jcb.bench.peers.cells import Cell
from jcb.bench.peers.run import Run
from jcb.bench.peers.seat import Measured

TINY = Cell(name="tiny", requests=2, prompt=4, output=3)
MIX = Cell(name="mix", requests=3, prompt=None, output=None, rate=100.0)


def run_of(peer, rate, repeat=0, cell=TINY, through="engine", **measured):
    """A run that wrote 100 tokens at `rate` tokens a second."""
    fields = {"counts": [50, 50], "ttfts": [0.1, 0.3], "itls": [0.01, 0.02, 0.03]} | measured
    return Run(
        cell=cell,
        peer=peer,
        through=through,
        repeat=repeat,
        asked=100,
        measured=Measured(seconds=100 / rate, **fields),
        moment=Moment(copy=10e9 + repeat, matmul=100e9),
    )
