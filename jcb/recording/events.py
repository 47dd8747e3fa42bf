"""The lines of a recording, as values and as JSON objects.

Times `t` are seconds since the recording began, on the engine's monotonic clock. Requests and namespaces are numbered.
A chain numbers full pages of tokens, each together with all pages before it, in the order of first appearance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Annotated, Any, Literal

import msgspec

from jcb.types import RowKind

VERSION = 1

MOST = (1 << 31) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
When = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
EndReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line. config: sections of the resolved configuration and the buckets; shape: the model's dimensions."""

    model: str
    vocab_size: Annotated[int, msgspec.Meta(ge=3, le=MOST)]
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

    t: When
    id: Count
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST)]
    max_tokens: Count
    min_tokens: Count = 0
    priority: Whole = 0
    namespace: Count = 0
    chain: tuple[Count, ...] = ()
    arrived: When = 0.0
    is_open: bool = False  # the caller set no max_tokens; max_tokens is then what the model's length leaves
    guided: bool = False
    prompt_logprobs: bool = False
    token_ids: tuple[Count, ...] | None = None


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

    step: Count
    t: When
    rows: tuple[Row, ...]
    preempted: tuple[Whole, ...] = ()
    bucket: tuple[Count, Count, Count] = (0, 0, 0)
    host: Seconds = 0.0
    wait: When = 0.0
    device: Seconds = 0.0
    before: Seconds = 0.0
    dispatch: Seconds = 0.0
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

    t: When
    id: Count
    reason: EndReason
    output_tokens: Count
    first_token_t: When | None = None
    chain: tuple[Count, ...] = ()
    code: str = ""
    token_ids: tuple[Count, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A request was ended from outside, between two turns; its End follows. reason: "stop" for a stop string."""

    t: When
    id: Count
    reason: EndReason = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Settings of the scheduler were changed between two turns."""

    t: When
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncated:
    """The recording ends here though the run went on."""

    t: When
    reason: str


Event = Arrival | Step | End | Abort | Knobs | Truncated
NAMES: dict[str, type[Event]] = {
    "arrival": Arrival,
    "step": Step,
    "end": End,
    "abort": Abort,
    "knobs": Knobs,
    "truncated": Truncated,
}
_ALWAYS = ("chain", "preempted")
_FIELDS = {kind: {each.name for each in dataclass_fields(kind)} for kind in NAMES.values()}
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
    """The event of one line's object. Raises ValueError for what is none, and for a value that cannot be."""
    name = line.get("event")
    kind = NAMES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"unknown event {str(name)[:64]!r}")
    fields = {name: value for name, value in line.items() if name != "event"}
    if unknown := fields.keys() - _FIELDS[kind]:
        raise ValueError(f"{name} has no {sorted(unknown)[0][:64]!r}")
    if kind is not Step:
        return msgspec.convert(fields, kind)
    rows = fields.get("rows")
    if not isinstance(rows, list):
        raise ValueError("a step needs a list of rows")
    step = msgspec.convert(fields | {"rows": []}, Step)
    return replace(step, rows=tuple([_row(row) for row in rows]))


def header_from_json(line: Mapping[str, Any]) -> Header:
    """The header of the first line's object. Raises ValueError for another version and for wrong fields."""
    if line.get("jcb_recording") != VERSION:
        raise ValueError(f"the first line is no header of a jcb recording of version {VERSION}")
    fields = {name: value for name, value in line.items() if name != "jcb_recording"}
    if unknown := fields.keys() - {each.name for each in dataclass_fields(Header)}:
        raise ValueError(f"the header has wrong fields: {sorted(unknown)[0][:64]!r} is none")
    try:
        return msgspec.convert(fields, Header)
    except msgspec.ValidationError as error:
        raise ValueError(f"the header has wrong fields: {error}") from error


_KINDS = {kind.value: kind for kind in RowKind}


def _row(line: object) -> Row:
    if not isinstance(line, list) or len(line) not in (6, 7):
        raise ValueError(f"a row has six or seven entries: {str(line)[:64]}")
    id_, slot, start, q_len, name, samples, *rest = line
    kind = _KINDS.get(name) if isinstance(name, str) else None
    pages = rest[0] if rest else []
    numbers = [id_, slot, start, q_len, samples, *pages] if isinstance(pages, list) else []
    if kind is None or not numbers or not all(type(number) is int and 0 <= number <= MOST for number in numbers):
        raise ValueError(f"a row's numbers and kind cannot be: {str(line)[:64]}")
    return Row(id_, slot, start, q_len, kind, bool(samples), tuple(pages))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
