"""The lines of a recording, as values and as JSON objects.

Times `t` are seconds since the recording began, on the engine's monotonic clock. Requests and namespaces are numbered.
A chain numbers full pages of tokens, each together with all pages before it, in the order of first appearance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jcb.types import RowKind

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line. config: sections of the resolved configuration and the buckets; shape: the model's dimensions."""

    model: str
    vocab_size: int
    platform: str
    started_at: float  # Unix time
    config: Mapping[str, Any]
    shape: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As written; numbers that JSON lacks (a time-out of infinity) are null."""
        return {"jcb_recording": VERSION, **_finite(asdict(self))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request was admitted to the queue.

    t: when the engine took it in; arrived: when it was submitted. max_tokens: None leaves it to the model's length.
    guided: it follows a grammar. token_ids: only where asked for.
    """

    t: float
    id: int
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    priority: int = 0
    namespace: int = 0
    chain: tuple[int, ...] = ()
    arrived: float = 0.0
    is_open: bool = False  # the caller set no max_tokens; max_tokens is then what the model's length leaves
    guided: bool = False
    prompt_logprobs: bool = False
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step. pages: those added to its page table since its last row (all for a new one)."""

    id: int
    slot: int
    start: int
    q_len: int
    kind: RowKind
    samples: bool
    pages: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        """As written: pages only where there are some."""
        fields = [self.id, self.slot, self.start, self.q_len, self.kind.value, int(self.samples)]
        return [*fields, list(self.pages)] if self.pages else fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn of the engine's loop; without rows nothing was dispatched, and the turn only took in results.

    Seconds: `before` from t to the start of the dispatch, `dispatch` of that call, `host` of the turn without its wait
    for the device, `wait` that wait, `device` from when the device could begin this step until its result was taken.
    bucket: (tokens, rows, pages a row) of the program. failed: "dispatch" or "collect" where that raised; "void" for
    a step lost with another.
    """

    step: int
    t: float
    rows: tuple[Row, ...]
    preempted: tuple[int, ...] = ()
    bucket: tuple[int, int, int] = (0, 0, 0)
    host: float = 0.0
    wait: float = 0.0
    device: float = 0.0
    before: float = 0.0
    dispatch: float = 0.0
    failed: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that were asked for; the bucket says how many were computed."""
        return sum(row.q_len for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """True for one token a row."""
        return all(row.q_len == 1 for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A request ended. chain: of the whole sequence. first_token_t: None without a token. code: of an error."""

    t: float
    id: int
    reason: str
    output_tokens: int
    first_token_t: float | None = None
    chain: tuple[int, ...] = ()
    code: str = ""
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A request was ended from outside, between two turns; its End follows. reason: "stop" for a stop string."""

    t: float
    id: int
    reason: str = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Settings of the scheduler were changed between two turns."""

    t: float
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncated:
    """The recording ends here though the run went on."""

    t: float
    reason: str


Event = Arrival | Step | End | Abort | Knobs | Truncated
NAMES: dict[str, type] = {
    "arrival": Arrival,
    "step": Step,
    "end": End,
    "abort": Abort,
    "knobs": Knobs,
    "truncated": Truncated,
}
_ALWAYS = ("chain", "preempted")
_WORDS = {kind: name for name, kind in NAMES.items()}


def to_json(event: Event) -> dict[str, Any]:
    """The object of one line. Empty optional fields are left out."""
    line: dict[str, Any] = {"event": _WORDS[type(event)]}
    for name in event.__slots__:
        value = getattr(event, name)
        if name == "rows":
            value = [row.to_json() for row in value]
        elif value is None or value is False or value == "" or (value == () and name not in _ALWAYS):
            continue
        line[name] = value
    return line


def from_json(line: Mapping[str, Any]) -> Event:
    """The event of one line's object. Raises ValueError, KeyError or TypeError for what is none."""
    kind = NAMES.get(line["event"])
    if kind is None:
        raise ValueError(f"unknown event {line['event']!r}")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    del fields["event"]
    if "rows" in fields:
        fields["rows"] = tuple(_row(row) for row in fields["rows"])
    return kind(**fields)


def header_from_json(line: Mapping[str, Any]) -> Header:
    """The header of the first line's object. Raises ValueError for another version."""
    if line.get("jcb_recording") != VERSION:
        raise ValueError(f"the first line is no header of a jcb recording of version {VERSION}")
    return Header(**{name: value for name, value in line.items() if name != "jcb_recording"})


_KINDS = {kind.value: kind for kind in RowKind}


def _row(line: list[Any]) -> Row:
    id_, slot, start, q_len, kind, samples, *pages = line
    return Row(id_, slot, start, q_len, _KINDS[kind], bool(samples), tuple(pages[0]) if pages else ())


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
