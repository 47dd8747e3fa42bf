"""A peer's server, asked by streams; peers that are not there."""

import dataclasses
from pathlib import Path

import pytest

from jcb.bench.peers.catalogue import Peer
from jcb.bench.peers.child import PeerError
from jcb.bench.peers.seat import EngineSeat, ServerSeat

SERVER = str(Path(__file__).with_name("fake_server.py"))
PEER = Peer(name="fake", runner="fake", server=(SERVER, "{port}"), ready="/ready")
JOBS = [{"prompt": [1, 2, 3], "output": 4, "at": 0.0}, {"prompt": [1], "output": 2, "at": 0.1}]


@pytest.fixture
def serve(tmp_path):
    seats = []

    def make(peer):
        seats.append(ServerSeat(peer, tmp_path))
        return seats[-1]

    yield make
    for seat in seats:
        seat.close()


def test_a_server_is_measured_by_streams(serve):
    seat = serve(PEER)
    assert seat.start(30)["load_seconds"] > 0
    seat.pause()
    seat.resume()
    found = seat.measure(JOBS, 30)
    assert found.counts == [4, 2]
    assert len(found.ttfts) == 2
    assert len(found.itls) <= 4, "events may come together, but no token more than was written"
    assert found.seconds >= 0.1, "the second request is sent after 100 ms"


def test_requests_that_fail_are_counted_and_quoted(serve):
    seat = serve(dataclasses.replace(PEER, server=(SERVER, "{port}", "fails")))
    seat.start(30)
    with pytest.raises(PeerError, match="2 of 2 requests failed: status 500: out of pages"):
        seat.measure(JOBS, 30)


def test_a_peer_without_a_server_says_so(serve):
    with pytest.raises(PeerError, match="it answers one at a time"):
        serve(Peer(name="fake", runner="fake", no_server="it answers one at a time")).start(30)


def test_a_peer_that_is_not_installed_says_how(tmp_path):
    with pytest.raises(PeerError, match="not installed: `make install-peers`"):
        EngineSeat(Peer(name="fake", runner="fake", environment="nobody"), tmp_path).start(30)
