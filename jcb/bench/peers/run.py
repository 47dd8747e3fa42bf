"""The interleaved run: at every cell one peer's turn after the other's, all but one held, the machine measured too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jcb.bench.peers.calibration import Moment
from jcb.bench.peers.cells import Cell
from jcb.bench.peers.child import PeerError
from jcb.bench.peers.seat import Measured, Seat

Say = Callable[[str], None]
_PROBE_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Run:
    """One peer's turn at one cell. asked: tokens to write; what came is in `measured`."""

    cell: Cell
    peer: str
    through: str
    repeat: int
    asked: int
    measured: Measured
    moment: Moment

    @property
    def emitted(self) -> int:
        return sum(self.measured.counts)

    @property
    def rate(self) -> float:
        """Output tokens a second, of those that came."""
        return self.emitted / self.measured.seconds


@dataclass(kw_only=True)
class Findings:
    """What a run found. told: what each peer said of itself. samples: its answer to the probe. failures: why a peer,
    or a peer's server, is missing or stopped, by name.
    """

    runs: list[Run] = field(default_factory=list)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, list[int]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Most seconds for a peer to load, and for one turn at a cell."""

    load: float = 900.0
    turn: float = 300.0


def turns(cells: Sequence[Cell], seats: Sequence[Seat], repeats: int) -> Iterator[tuple[int, Cell, Seat]]:
    """(repeat, cell, seat): at each cell one seat after the other, their order reversed in every other repeat."""
    for repeat in range(repeats):
        for cell in cells:
            for seat in seats if repeat % 2 == 0 else reversed(seats):
                if takes(seat, cell):
                    yield repeat, cell, seat


def takes(seat: Seat, cell: Cell) -> bool:
    """Servers take the cells through HTTP; so do the engines that have one, for comparison."""
    return cell.http if seat.through == "http" else not cell.http or bool(seat.peer.server)


class Measurement:
    """Runs cells on seats and keeps what it finds; a seat that fails is named and left out from then on."""

    def __init__(
        self,
        calibrate: Callable[[], Moment],
        patience: Patience,
        say: Say = print,
        *,
        probe: Sequence[int] = (),
        after_repeat: Callable[[Findings], object] = lambda findings: None,
    ) -> None:
        self.findings = Findings()
        self._calibrate, self._patience, self._say = calibrate, patience, say
        self._probe, self._after_repeat = probe, after_repeat

    def start(self, seats: Sequence[Seat], cells: Sequence[Cell]) -> list[Seat]:
        """Load and warm up one seat after the other; those that can go on, paused."""
        ready = []
        for seat in seats:
            mine = [cell for cell in cells if takes(seat, cell)]
            self._say(f"{label(seat)}: loading ...")
            began = time.perf_counter()
            try:
                self._prepare(seat, mine)
            except PeerError as error:
                self._drop(seat, error)
                continue
            seat.pause()
            ready.append(seat)
            self._say(f"  ready and warm after {time.perf_counter() - began:.0f} s")
        return ready

    def _prepare(self, seat: Seat, cells: Sequence[Cell]) -> None:
        self.findings.told[label(seat)] = dict(seat.start(self._patience.load))
        if self._probe and seat.through == "engine":
            job = {"prompt": list(self._probe), "output": _PROBE_TOKENS, "at": 0.0}
            self.findings.samples[seat.peer.name] = seat.measure([job], self._patience.load).sample
        for cell in cells:
            seat.measure(cell.warm_up(), self._patience.load)

    def run(self, cells: Sequence[Cell], seats: Sequence[Seat], repeats: int) -> None:
        """Every turn. The seats must be paused and are paused again afterwards."""
        planned = list(turns(cells, seats, repeats))
        gone: set[str] = set()
        began, before = time.perf_counter(), 0
        for number, (repeat, cell, seat) in enumerate(planned, 1):
            if repeat != before:
                before = repeat
                self._after_repeat(self.findings)
            if label(seat) in gone:
                continue
            try:
                found = self._turn(repeat, cell, seat)
            except PeerError as error:
                gone.add(label(seat))
                self._drop(seat, error)
                continue
            left = (time.perf_counter() - began) / number * (len(planned) - number)
            self._say(f"[{number}/{len(planned)}] {_line(found)}; about {left / 60:.0f} min left")

    def _turn(self, repeat: int, cell: Cell, seat: Seat) -> Run:
        jobs, moment = cell.jobs(), self._calibrate()
        seat.resume()
        measured = seat.measure(jobs, self._patience.turn)
        seat.pause()
        found = Run(
            cell=cell,
            peer=seat.peer.name,
            through=seat.through,
            repeat=repeat,
            asked=sum(job["output"] for job in jobs),
            measured=measured,
            moment=moment,
        )
        self.findings.runs.append(found)
        if found.emitted != found.asked:
            self.findings.failures[f"{label(seat)}, {cell.title}"] = f"wrote {found.emitted} of {found.asked} tokens"
        return found

    def _drop(self, seat: Seat, error: PeerError) -> None:
        self.findings.failures[label(seat)] = str(error)
        self._say(f"  {label(seat)} is left out: {error}")
        seat.close()


def label(seat: Seat) -> str:
    """The peer's name, with "server" where it is that."""
    return f"{seat.peer.name} server" if seat.through == "http" else seat.peer.name


def _line(run: Run) -> str:
    where = " (HTTP)" if run.through == "http" else ""
    return (
        f"{run.cell.title}: {run.peer}{where} {run.rate:.1f} tokens/s in {run.measured.seconds:.1f} s "
        f"(copy {run.moment.copy / 1e9:.1f} GB/s, matmul {run.moment.matmul / 1e9:.0f} GFLOP/s)"
    )
