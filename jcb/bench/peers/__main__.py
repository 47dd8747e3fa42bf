"""`python -m jcb.bench.peers`: jcb beside other engines, interleaved in one run on this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from rich.console import Console

from jcb.bench.peers import report
from jcb.bench.peers.calibration import Calibration
from jcb.bench.peers.catalogue import Files, Machine, Peer, catalogue, parse_mode
from jcb.bench.peers.cells import CELLS, QUICK, Cell, chosen
from jcb.bench.peers.checkpoint import f16_gguf, hf_folder
from jcb.bench.peers.run import Findings, Measurement, Patience
from jcb.bench.peers.runners.protocol import use_cores
from jcb.bench.peers.seat import EngineSeat, Seat, ServerSeat
from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.reader import open_checkpoint
from jcb.engine.resolve import auto_dtype
from jcb.text.tokenizer import load_tokenizer

_PROBE = "The capital of France is"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when any peer ran, whatever was found; 2 for flags that make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers are ended
    try:
        cells = chosen(QUICK if options.quick else CELLS, options.cells, options.rate)
        modes = dict(parse_mode(text) for text in options.jcb_mode)
        use_cores(options.threads)
        peers = _peers(options, cells, modes)
    except ValueError as error:
        parser.error(str(error))
    repeats = 2 if options.quick else options.repeats
    findings = measure(peers, cells, repeats, options.output, Patience(load=options.load_timeout, turn=options.timeout))
    jcb = [peer.name for peer in peers if peer.is_jcb]
    report.show(findings, jcb, Console(width=None if sys.stdout.isatty() else 220))
    _write(findings, jcb, options.output, picture=True)
    return 0 if findings.runs else 1


def measure(peers: Sequence[Peer], cells: Sequence[Cell], repeats: int, output: Path, patience: Patience) -> Findings:
    """Engines first, each other's company; then the servers, beside the engines they belong to."""
    jcb = [peer.name for peer in peers if peer.is_jcb]
    tokenizer = load_tokenizer(open_checkpoint(default_model_path()))
    measurement = Measurement(
        Calibration(),
        patience,
        _say,
        probe=tokenizer.encode(_PROBE),
        after_repeat=lambda findings: _write(findings, jcb, output, picture=False),
    )
    http, plain = [cell for cell in cells if cell.http], [cell for cell in cells if not cell.http]
    with _closing() as seats:
        seats += [EngineSeat(peer, output / "logs") for peer in peers if plain or peer.server]
        ready = measurement.start(seats, cells)
        measurement.run(plain, ready, repeats)
        if http:
            for seat in ready:
                if not seat.peer.server:
                    seat.close()
            servers: list[Seat] = [ServerSeat(peer, output / "logs") for peer in peers]
            seats += servers
            engines = [
                seat for seat in ready if seat.peer.server and seat.peer.name not in measurement.findings.failures
            ]
            measurement.run(http, [*measurement.start(servers, http), *engines], repeats)
    return measurement.findings


@contextlib.contextmanager
def _closing() -> Generator[list[Seat]]:
    """A list whose seats are closed in the end."""
    seats: list[Seat] = []
    try:
        yield seats
    finally:
        for seat in seats:
            seat.close()


def _peers(options: argparse.Namespace, cells: Sequence[Cell], modes: dict[str, tuple[str, ...]]) -> list[Peer]:
    """Those that were chosen. ValueError for a name that no peer has."""
    models, source = options.output / "models", default_model_path()
    dtype = auto_dtype("cpu")
    longest = max(cell.longest for cell in cells)
    machine = Machine(
        threads=options.threads, dtype=dtype, max_model_len=-(-longest // 64) * 64, work=options.output.resolve()
    )
    _say("making the model's files ...")
    folder, f16 = hf_folder(source, models, dtype).resolve(), f16_gguf(source, models).resolve()
    found = catalogue(machine, Files(gguf=source, f16=f16, folder=folder), modes)
    for name in options.peers:
        if name not in found:
            raise ValueError(f"--peers {name!r} is not one of {', '.join(found)}")
    return [found[name] for name in options.peers or found]


def _write(findings: Findings, jcb: Sequence[str], output: Path, *, picture: bool) -> None:
    """peers.json and, once all is done, peers.png."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "peers.json").write_text(json.dumps(report.as_json(findings, jcb), indent=1) + "\n", encoding="utf-8")
    if picture and findings.runs:
        from jcb.bench.peers.picture import draw

        draw(findings.runs, output / "peers.png", note=str(report.machine(findings.runs)))
        _say(f"wrote {output / 'peers.json'} and {output / 'peers.png'}")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jcb.bench.peers",
        description="jcb beside other engines: the same prompts and weights, interleaved, greedy, prefix caches off",
        epilog=f"cells: {', '.join(CELLS)}",
    )
    parser.add_argument("--peers", type=_names, default=[], metavar="A,B", help="peers to run (all)")
    parser.add_argument("--cells", type=_names, default=[], metavar="A,B", help="cells to run (all)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each peer at each cell (5)")
    parser.add_argument("--output", type=Path, default=Path("build/peers"), help="folder for all files (build/peers)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny cells, 2 repeats: see that all runs, measure nothing"
    )
    parser.add_argument(
        "--jcb-mode", action="append", default=[], metavar="NAME=KEY=VALUE,...",
        help="another jcb, named jcb-NAME, with these settings (as in f32=dtype=float32); may be repeated",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="cores that everything is kept to (2)")
    parser.add_argument("--rate", type=float, help="requests a second of the mixed cells (4; 1 through HTTP)")
    parser.add_argument("--timeout", type=float, default=300.0, help="most seconds for one turn (300)")
    parser.add_argument("--load-timeout", type=float, default=900.0, help="most seconds for loading one peer (900)")
    return parser


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
