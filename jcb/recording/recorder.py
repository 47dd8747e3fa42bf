"""Writes a run as it happens: the engine's thread notes references, a thread of its own makes lines of them.

The engine pays for an append a turn. The writer holds the interpreter for one line at a time, so a step waits for it
at most that long.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from jcb.recording.events import Abort, Arrival, End, Event, Header, Knobs, Row, Step, Truncated, to_json
from jcb.recording.reader import is_recording
from jcb.types import FinishReason, Request, ScheduledRow, Sequence, SequenceOutput, StepPlan

logger = logging.getLogger(__name__)

WRITE_INTERVAL = 0.05
"""Seconds between two visits of the writer."""

MAX_PENDING = 20_000
"""Notes that may wait for the writer; more (a disk that stands still) end the recording."""

MAX_BYTES = 4 << 30
"""Size at which a recording ends by itself."""

MAX_KNOWN = 1 << 20
"""Distinct pages (and namespaces) told apart; the oldest is then forgotten and would get a new number."""


class TurnTimes(NamedTuple):
    """When a turn began and ended, and the seconds in it, see `Step`."""

    t: float
    end: float
    host: float
    before: float
    dispatch: float


class _Turn(NamedTuple):
    plan: StepPlan
    outputs: tuple[SequenceOutput, ...]  # those that end a request
    times: TurnTimes


@dataclass(frozen=True, slots=True)
class _Note:
    """A request came (request) or was aborted (output), or knobs were turned (changes); else the recording ends."""

    now: float
    request: Request | None = None
    output: SequenceOutput | None = None
    changes: Mapping[str, Any] | None = None


class RecordingFile:
    """A file that a recording may be written to, opened before anything else takes time.

    Raises ValueError that says why it cannot be one; an old recording is replaced, any other file is not.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.path = Path(path).expanduser()
            if self.path.is_fifo() or self.path.is_socket():  # opening one would wait for its reader
                raise ValueError(f"record={str(path)!r} is a pipe or a socket: name a file")
            if self.path.exists() and self.path.stat().st_size and not is_recording(self.path):
                raise ValueError(
                    f"record={str(path)!r} exists and is no recording: it is left alone, name another file"
                )
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except RuntimeError as error:
            raise ValueError(f"record={str(path)!r} cannot be written: {error}") from error
        except OSError as error:
            raise ValueError(f"record={str(path)!r} cannot be written: {error.strerror}") from error
        self.file: IO[str] = open(descriptor, "w", encoding="utf-8")  # noqa: SIM115 (the recorder closes it)


@dataclass(slots=True)
class _Live:
    """A request that has not ended, as the writer knows it. chain: numbers of its prompt's full pages."""

    number: int
    request: Request
    chain: tuple[int, ...]
    digest: bytes  # of the chain's last page
    sequence: Sequence | None = None
    page_table: tuple[int, ...] = ()


class _Numbers:
    """Small numbers for distinct things, in the order of first appearance; bounded."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._next = 0

    def of(self, thing: Hashable) -> int:
        number = self._numbers.get(thing)
        if number is None:
            number = self._numbers[thing] = self._next
            self._next += 1
            if len(self._numbers) > MAX_KNOWN:
                del self._numbers[next(iter(self._numbers))]
        return number


class Recorder:
    """What an EngineCore tells of its run, as lines of a file.

    choose: the step shape of a plan, as (tokens, rows, pages a row). The methods that take notes belong to the
    engine's thread and never raise; `close` may be called from any thread, and again.
    """

    def __init__(
        self,
        file: RecordingFile,
        header: Header,
        *,
        choose: Callable[[StepPlan], tuple[int, int, int]],
        started: float,
        token_ids: bool = False,
    ) -> None:
        self._file = file.file
        self._choose = choose
        self._started = started
        self._token_ids = token_ids
        self._page_size = int(header.config["cache"]["page_size"])
        self._notes: deque[_Turn | _Note] = deque()
        self._device: dict[int, tuple[float, str]] = {}  # by step: seconds, and how it failed
        self._live: dict[str, _Live] = {}
        self._pages, self._namespaces = _Numbers(), _Numbers()
        self._count = 0
        self._written = 0
        self._ended = False
        self._closing = threading.Event()
        self._write(header.to_json())
        self._thread = threading.Thread(target=self._run, name="jcb-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # -- the engine's side

    def arrived(self, request: Request, now: float) -> None:
        """A request was admitted."""
        self._note(_Note(now, request=request))

    def aborted(self, output: SequenceOutput, now: float) -> None:
        """A request was ended between two turns."""
        self._note(_Note(now, output=output))

    def knobs_turned(self, changes: Mapping[str, Any], now: float) -> None:
        """Settings of the scheduler were changed between two turns."""
        self._note(_Note(now, changes=dict(changes)))

    def collected(self, step_id: int, seconds: float) -> None:
        """The result of a step was taken in."""
        if not self._ended:
            self._device[step_id] = (seconds, "")

    def failed(self, step_id: int, where: str, void: Seq[int]) -> None:
        """A step raised in `where`; those of `void` were in flight behind or before it."""
        if not self._ended:
            self._device |= dict.fromkeys(void, (0.0, "void")) | {step_id: (0.0, where)}

    def turned(self, plan: StepPlan, outputs: Seq[SequenceOutput], **times: float) -> None:
        """A turn of the loop is over; `times` are those of TurnTimes."""
        ends = tuple([output for output in outputs if output.finish_reason is not None])
        self._note(_Turn(plan, ends, TurnTimes(**times)))

    def close(self) -> None:
        """Write what is left and close the file."""
        self._closing.set()
        self._thread.join(10.0)
        atexit.unregister(self.close)

    def _note(self, note: _Turn | _Note) -> None:
        if not self._ended and len(self._notes) < MAX_PENDING:
            self._notes.append(note)
        elif not self._ended:
            self._ended = True
            self._notes.append(_Note(note.times.end if isinstance(note, _Turn) else note.now))

    # -- the writer's side

    def _run(self) -> None:
        try:
            while not self._closing.wait(WRITE_INTERVAL):
                self._drain(final=False)
            self._drain(final=True)
        except Exception as error:  # the run goes on without it; the text of `error` might quote a request
            self._end_early()
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            logger.error("the recording ends early: %s", reason)
        finally:
            with contextlib.suppress(OSError):
                self._file.close()

    def _drain(self, *, final: bool) -> None:
        while self._notes:
            if not final and not self._is_complete(self._notes[0]):
                break
            for event in self._events(self._notes.popleft()):
                self._write(to_json(event))
            if self._written > MAX_BYTES and not self._ended:
                self._end_early()
                self._write(to_json(Truncated(t=self._seconds(time.monotonic()), reason=f"{MAX_BYTES:,} bytes")))
            time.sleep(0)  # a step that waits for the interpreter gets it now
        self._file.flush()

    def _end_early(self) -> None:
        self._ended = True
        self._notes.clear()
        self._device.clear()

    def _is_complete(self, note: _Turn | _Note) -> bool:
        return not isinstance(note, _Turn) or not note.plan.rows or note.plan.step_id in self._device

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        self._written += len(text) + 1
        self._file.write(text + "\n")

    def _events(self, note: _Turn | _Note) -> Iterator[Event]:
        if isinstance(note, _Turn):
            yield self._step(note)
            for output in note.outputs:
                yield from self._end(output, self._seconds(note.times.end))
            return
        t = self._seconds(note.now)
        if note.request is not None:
            yield self._arrival(note.request, t)
        elif note.output is not None:
            live = self._live.get(note.output.request_id)
            if live is not None:
                yield Abort(t=t, id=live.number, reason=(note.output.finish_reason or FinishReason.ABORT).value)
            yield from self._end(note.output, t)
        elif note.changes is not None:
            yield Knobs(t=t, changes=note.changes)
        else:
            yield Truncated(t=t, reason=f"{MAX_PENDING:,} notes were waiting to be written")

    def _arrival(self, request: Request, t: float) -> Arrival:
        number = self._count
        self._count += 1
        namespace = self._namespaces.of(request.namespace)
        chain, digest = self._extend((), namespace.to_bytes(8), request.prompt_token_ids)
        self._live[request.request_id] = _Live(number, request, chain, digest)
        return Arrival(
            t=t,
            id=number,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            min_tokens=request.params.min_tokens,
            priority=request.priority,
            namespace=namespace,
            chain=chain,
            arrived=self._seconds(request.arrival_time),
            is_open=request.params.max_tokens is None,
            guided=request.grammar is not None,
            prompt_logprobs=request.params.prompt_logprobs is not None,
            token_ids=tuple(request.prompt_token_ids) if self._token_ids else None,
        )

    def _step(self, turn: _Turn) -> Step:
        plan, times = turn.plan, turn.times
        device, failed = self._device.pop(plan.step_id, (0.0, "void" if plan.rows else ""))
        return Step(
            step=plan.step_id,
            t=self._seconds(times.t),
            rows=tuple([self._row(row) for row in plan.rows]),
            preempted=tuple([self._number(name) for name in plan.preempted]),
            bucket=self._choose(plan) if plan.rows else (0, 0, 0),
            host=_round(times.host),
            wait=_round(times.end - times.t - times.host),
            device=_round(device),
            before=_round(times.before),
            dispatch=_round(times.dispatch),
            failed=failed,
        )

    def _row(self, row: ScheduledRow) -> Row:
        live = self._live[row.sequence.request_id]
        live.sequence = row.sequence
        known = row.num_known_pages(live.page_table)
        live.page_table = row.page_table
        return Row(live.number, row.slot, row.start, row.q_len, row.kind, row.samples, row.page_table[known:])

    def _number(self, request_id: str) -> int:
        live = self._live.get(request_id)
        return -1 if live is None else live.number

    def _end(self, output: SequenceOutput, t: float) -> Iterator[End]:
        live = self._live.pop(output.request_id, None)
        if live is None:
            return
        sequence, request = live.sequence, live.request
        generated = [] if sequence is None else sequence.output_token_ids
        first = None if sequence is None else sequence.first_token_time
        size = self._page_size
        tail = (*request.prompt_token_ids[len(live.chain) * size :], *generated)
        yield End(
            t=t,
            id=live.number,
            reason=(output.finish_reason or FinishReason.ABORT).value,
            output_tokens=len(generated),
            first_token_t=None if first is None else self._seconds(first),
            chain=self._extend(live.chain, live.digest, tail)[0],
            code="" if output.error is None else output.error.code or "error",
            token_ids=tuple(generated) if self._token_ids else None,
        )

    def _extend(self, chain: tuple[int, ...], digest: bytes, tokens: Seq[int]) -> tuple[tuple[int, ...], bytes]:
        """`chain`, whose last page has `digest`, longer by the full pages of `tokens`."""
        size = self._page_size
        numbers = list(chain)
        for stop in range(size, len(tokens) + 1, size):
            digest = blake2b(digest + array("i", tokens[stop - size : stop]).tobytes(), digest_size=16).digest()
            numbers.append(self._pages.of(digest))
        return tuple(numbers), digest

    def _seconds(self, when: float) -> float:
        return _round(when - self._started)


def _round(seconds: float) -> float:
    """Microseconds are enough, and they keep the file small."""
    return round(seconds, 6)
