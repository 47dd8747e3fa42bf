"""The interleaved run: order, one at a time, failures named."""

from jcb.bench.peers.cells import Cell
from jcb.bench.peers.run import Measurement, Patience, turns
from tests.bench.peers.runs import TINY

OTHER = Cell(name="other", requests=1, prompt=2, output=2)
HTTP = Cell(name="http", requests=1, prompt=2, output=2, http=True)


class Idle:
    """A seat that is only asked who it is."""

    def __init__(self, peer, through="engine"):
        self.peer, self.through = peer, through


def test_peers_take_turns_at_a_cell_and_change_places(make_peer):
    a, b = Idle(make_peer("a")), Idle(make_peer("b"))
    order = [(repeat, cell.name, seat.peer.name) for repeat, cell, seat in turns([TINY, OTHER], [a, b], 3)]
    assert order == [
        (0, "tiny", "a"), (0, "tiny", "b"), (0, "other", "a"), (0, "other", "b"),
        (1, "tiny", "b"), (1, "tiny", "a"), (1, "other", "b"), (1, "other", "a"),
        (2, "tiny", "a"), (2, "tiny", "b"), (2, "other", "a"), (2, "other", "b"),
    ]  # fmt: skip


def test_http_cells_are_for_servers_and_the_engines_behind_them(make_peer):
    import dataclasses

    served = dataclasses.replace(make_peer("a"), server=("serve",))
    seats = [Idle(served, "http"), Idle(served), Idle(make_peer("b"))]
    found = [(cell.name, seat.peer.name, seat.through) for _, cell, seat in turns([TINY, HTTP], seats, 1)]
    assert found == [("tiny", "a", "engine"), ("tiny", "b", "engine"), ("http", "a", "http"), ("http", "a", "engine")]


def test_a_run_goes_on_without_those_that_fail(seat_of, calibrate):
    said = []
    seats = [seat_of("good"), seat_of("bad", refuses=True), seat_of("short", drops=1), seat_of("also")]
    measurement = Measurement(calibrate, Patience(load=30, turn=30), said.append, probe=[1, 2])
    ready = measurement.start(seats, [TINY])
    measurement.run([TINY], ready, 2)
    found = measurement.findings
    assert [(run.repeat, run.peer) for run in found.runs] == [
        (0, "good"), (0, "short"), (0, "also"), (1, "also"), (1, "short"), (1, "good"),
    ]  # fmt: skip
    assert found.failures == {
        "bad": "ValueError: no weights here",
        "short, 4 in / 3 out, 2 requests": "wrote 4 of 6 tokens",
    }
    assert found.samples["good"] == [7] * 16
    assert found.told["good"]["precision"] == "none"
    assert any("bad is left out: ValueError" in line for line in said)


def test_a_peer_that_breaks_midway_keeps_what_it_did(seat_of, calibrate):
    seats = [seat_of("good"), seat_of("slow", pause=0.5)]
    measurement = Measurement(calibrate, Patience(load=30, turn=0.7), lambda text: None)
    ready = measurement.start(seats, [OTHER])
    measurement.run([Cell(name="longer", requests=1, prompt=2, output=9)], ready, 2)
    assert [run.peer for run in measurement.findings.runs] == ["good", "good"]
    assert "no answer to 'run' within 1 s" in measurement.findings.failures["slow"]


def test_only_the_measured_peer_may_run(make_peer, calibrate):
    events = []

    class Watched(Idle):
        def start(self, seconds):
            return {"load_seconds": 0.0}

        def measure(self, jobs, seconds):
            from jcb.bench.peers.seat import Measured

            events.append(f"{self.peer.name} runs")
            return Measured(seconds=1.0, counts=[job["output"] for job in jobs], ttfts=[], itls=[])

        def pause(self):
            events.append(f"{self.peer.name} is held")

        def resume(self):
            events.append(f"{self.peer.name} is let go")

        def close(self):
            raise AssertionError

    seats = [Watched(make_peer("a")), Watched(make_peer("b"))]
    measurement = Measurement(calibrate, Patience(), lambda text: None)
    ready = measurement.start(seats, [TINY])
    assert events == ["a runs", "a is held", "b runs", "b is held"]
    events.clear()
    measurement.run([TINY], ready, 1)
    assert events == ["a is let go", "a runs", "a is held", "b is let go", "b runs", "b is held"]
