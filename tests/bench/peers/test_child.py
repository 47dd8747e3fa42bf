"""The runner's process and the protocol, against a runner without an engine."""

import os
import time

import pytest

from jcb.bench.peers.child import PeerError, Server

JOBS = [{"prompt": [1, 2], "output": 3, "at": 0.0}, {"prompt": [3], "output": 2, "at": 0.05}]


def test_an_engine_is_loaded_and_run(seat_of):
    seat = seat_of()
    told = seat.start(30)
    assert told["versions"] == {"fake": "1.0"}
    assert told["load_seconds"] >= 0
    found = seat.measure(JOBS, 30)
    assert found.counts == [3, 2]
    assert found.sample == [7, 7, 7]
    assert len(found.ttfts) == 2
    assert len(found.itls) == 3
    assert found.seconds >= 0.05, "the second request arrives after 50 ms"
    assert found.rss > 1_000_000


def test_a_held_engine_does_nothing_until_it_is_let_go(seat_of):
    seat = seat_of(pause=0.001)
    seat.start(30)
    seat.pause()
    with pytest.raises(PeerError, match="no answer to 'run' within 0 s"):
        seat.measure(JOBS, 0.3)
    seat.resume()


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"refuses": True}, "ValueError: no weights here"),
        ({"exits": True}, "it ended with status 3; last words: out of luck"),
    ],
)
def test_an_engine_that_does_not_load_says_why(seat_of, setting, error):
    with pytest.raises(PeerError, match=error):
        seat_of(**setting).start(30)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"raises": True}, "RuntimeError: no such kernel"),
        ({"illegal": True}, "ended by SIGILL .the processor lacks an instruction it uses."),
    ],
)
def test_an_engine_that_breaks_says_why(seat_of, setting, error):
    seat = seat_of(**setting)
    seat.start(30)
    with pytest.raises(PeerError, match=error):
        seat.measure(JOBS, 30)


def test_closing_ends_a_held_process(seat_of):
    seat = seat_of()
    seat.start(30)
    process = seat._runner.process
    seat.pause()
    seat.close()
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_server_that_dies_is_named(tmp_path):
    server = Server(["sh", "-c", "echo cannot bind >&2; exit 4"], {}, tmp_path / "log", "http://127.0.0.1:9")
    try:
        began = time.monotonic()
        with pytest.raises(PeerError, match="it ended with status 4; last words: cannot bind"):
            server.wait_until_ready("/ready", 30)
        assert time.monotonic() - began < 10
    finally:
        server.close()


def test_a_command_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PeerError, match="cannot start /nowhere/python: No such file or directory"):
        Server(["/nowhere/python"], {}, tmp_path / "log", "")
