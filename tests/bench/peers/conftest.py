"""Peers whose runner is a script of the tests."""

import dataclasses
import sys
from pathlib import Path

import pytest

from jcb.bench.peers.calibration import Moment
from jcb.bench.peers.catalogue import Peer
from jcb.bench.peers.seat import EngineSeat

FAKE = Path(__file__).with_name("fake_runner.py")
ROOT = Path(__file__).parents[3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakePeer(Peer):
    @property
    def command(self):
        return [sys.executable, str(FAKE)]


@pytest.fixture
def make_peer():
    def make(name="fake", **settings):
        settings = {"threads": 1} | settings
        return FakePeer(
            name=name, runner=settings.pop("runner", "fake"), settings=settings, env={"PYTHONPATH": str(ROOT)}
        )

    return make


@pytest.fixture
def seat_of(make_peer, tmp_path):
    """A seat of a fake peer with these settings, closed in the end."""
    seats = []

    def make(name="fake", **settings):
        seats.append(EngineSeat(make_peer(name, **settings), tmp_path))
        return seats[-1]

    yield make
    for seat in seats:
        seat.close()


@pytest.fixture
def calibrate():
    return lambda: Moment(copy=10e9, matmul=100e9)
