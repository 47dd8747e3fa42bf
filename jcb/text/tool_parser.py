"""Finds tool calls in an answer as it comes, in one pass over its characters.

Text that is not a call stays content, and so does what began like a call and turned out to be none.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from jcb.text.tool_formats import ToolFormat

_SPACE = " \t\r\n"
_FIRST_KEYS = {"name", "type", "id", "arguments", "parameters"}


@dataclass(slots=True)
class ToolDelta:
    """A piece of call number `index`: `name` in its first delta only, then pieces of its arguments' JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What some text brought: content that is certain, and pieces of calls."""

    content: str
    calls: list[ToolDelta]


class ToolCallParser:
    """Reads one answer. The joined results are the same however the text is cut into pieces.

    names: the tools there are; without marks around a call (Llama) only these make a JSON object a call.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._raw: list[str] = []  # what was read since content was last certain
        self._mark = ""  # what may be the beginning of a mark
        self._content: list[str] = []
        self._calls: list[ToolDelta] = []
        self._reader: _CallReader | None = None
        self._read = self._text
        self._is_at_start = True
        self._in_list = False
        self._count = 0

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._count

    def push(self, text: str) -> Parsed:
        """Read on."""
        for character in text:
            self._raw.append(character)
            self._read(character)
        content, self._content = "".join(self._content), []
        calls, self._calls = _merged(self._calls), []
        return Parsed(content, calls)

    def finish(self) -> Parsed:
        """The answer has ended: what was held is content unless a call has begun."""
        if self._reader is None or not self._reader.is_told:
            if self._count and not "".join(self._raw).strip():
                self._raw = []
            self._give_raw()
        return self.push("")

    # ---- states: each takes one character, which is in _raw already

    def _text(self, character: str) -> None:
        """Outside of calls."""
        if not self._begin:
            self._text_without_marks(character)
            return
        self._mark += character
        if self._mark == self._begin:
            self._begin_block()
            return
        while self._mark and not self._begin.startswith(self._mark):
            self._mark = self._mark[1:]
        self._give_raw(keep=len(self._mark))

    def _text_without_marks(self, character: str) -> None:
        if character in _SPACE and (self._is_at_start or self._count):
            return
        if self._count and character in ";,":
            return
        if character == "{" and (self._is_at_start or self._count):
            self._begin_call()
        else:
            self._is_at_start = False
            self._give_raw()

    def _block(self, character: str) -> None:
        """Between the mark and the first call."""
        if character == "[" and not self._in_list:
            self._in_list = True
        elif character == "{":
            self._begin_call()
        elif character == "]" and self._in_list:
            self._read = self._after
        elif character not in _SPACE:
            self._give_up()

    def _call(self, character: str) -> None:
        """Inside a call."""
        reader = self._reader
        assert reader is not None
        reader.read(character)
        if reader.is_broken:
            self._give_up()
            return
        if reader.name is not None and not reader.is_told and (self._begin or reader.name in self._names):
            reader.is_told = True
            self._calls.append(ToolDelta(self._count, name=reader.name))
            self._count += 1
            self._raw = []
        if reader.is_told:
            self._calls.append(ToolDelta(self._count - 1, arguments=reader.take()))
        if reader.is_done:
            if reader.is_told:
                self._reader, self._raw = None, []
                self._read = self._after if self._begin else self._text
            else:
                self._give_up()

    def _after(self, character: str) -> None:
        """Behind a call: another one in the same list, the end mark, or content again."""
        if character in _SPACE or (self._in_list and character in ",]"):
            self._in_list = self._in_list and character != "]"
            self._raw = []
        elif character == "{" and self._in_list:
            self._begin_call()
        else:
            self._mark = ""
            self._read = self._end_mark if self._end else self._text
            self._read(character)

    def _end_mark(self, character: str) -> None:
        self._mark += character
        if self._mark == self._end:
            self._mark, self._raw, self._read, self._in_list = "", [], self._between, False
        elif not self._end.startswith(self._mark):
            held, self._mark, self._raw, self._read = self._mark, "", [], self._text
            for each in held:
                self._raw.append(each)
                self._read(each)

    def _between(self, character: str) -> None:
        """White space behind a block belongs to nobody."""
        if character in _SPACE:
            self._raw = []
        else:
            self._read = self._text
            self._text(character)

    # ---- changes of state

    def _begin_block(self) -> None:
        self._mark, self._in_list, self._read = "", False, self._block

    def _begin_call(self) -> None:
        self._reader, self._read = _CallReader(), self._call

    def _give_up(self) -> None:
        """What looked like a call is none."""
        if self._reader is not None and self._reader.is_told:
            self._raw = []
        self._reader, self._read, self._is_at_start, self._in_list = None, self._text, False, False
        self._give_raw()

    def _give_raw(self, keep: int = 0) -> None:
        """Makes what was read content, but for the last `keep` characters."""
        certain = len(self._raw) - keep
        self._content += self._raw[:certain]
        self._raw = self._raw[certain:]


class _CallReader:
    """One JSON object with a name and arguments, read from behind its "{"."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_told = self.is_done = self.is_broken = False
        self._arguments: list[str] = []  # not taken yet
        self._has_arguments = False
        self._key: str | None = None
        self._is_first = True
        self._value: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._waits_for = '"}'  # outside of values: what may come, white space aside

    def take(self) -> str:
        """The arguments' text read since the last time; a call without any has "{}"."""
        text, self._arguments = "".join(self._arguments), []
        return text

    def read(self, character: str) -> None:
        if self._waits_for:
            self._structure(character)
        else:
            self._content(character)

    def _structure(self, character: str) -> None:
        """Between keys and values."""
        if character in _SPACE:
            return
        if character not in self._waits_for:
            self.is_broken = True
        elif character == "}":
            self._end()
        elif character == ",":
            self._waits_for = '"'
        elif character == ":":
            self._waits_for, self._value, self._depth = "", [], 0
        else:  # the quote before a key
            self._waits_for, self._key, self._value, self._in_string = "", None, ['"'], True

    def _content(self, character: str) -> None:
        """Inside a key or a value."""
        if self._in_string:
            self._value.append(character)
            self._stream(character)
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                if self._key is None or self._depth == 0:
                    self._close()
            return
        if not self._value and character in _SPACE:
            return
        if self._depth == 0 and character in ",}" and self._value:
            self._close()
            self._structure(character)
            return
        if self._depth == 0 and self._value and character in _SPACE:
            self._close()
            return
        self._value.append(character)
        self._stream(character)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self.is_broken = self._depth < 0
                self._close()

    def _stream(self, character: str) -> None:
        if self._key in ("arguments", "parameters") and self._value[0] == "{":
            self._has_arguments = True
            self._arguments.append(character)

    def _close(self) -> None:
        """A key or a value is complete."""
        text = "".join(self._value)
        if self._key is None:
            key = _string(text)
            self._key = key or ""
            self.is_broken = key is None or (self._is_first and key not in _FIRST_KEYS)
            self._is_first, self._waits_for = False, ":"
            return
        if self._key == "name" and self.name is None:
            self.name = _string(text)
            self.is_broken = not self.name
        elif self._key in ("arguments", "parameters") and text[:1] == '"':
            self._has_arguments = True
            self._arguments.append(_string(text) or "")
        self._key, self._value, self._waits_for = None, [], ",}"

    def _end(self) -> None:
        self.is_done = True
        if not self._has_arguments:
            self._arguments.append("{}")


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _merged(deltas: list[ToolDelta]) -> list[ToolDelta]:
    """Neighbouring pieces of one call as one; empty ones are left out."""
    merged: list[ToolDelta] = []
    for delta in deltas:
        if delta.name is None and merged and merged[-1].index == delta.index and merged[-1].name is None:
            merged[-1].arguments += delta.arguments
        elif delta.name is not None or delta.arguments:
            merged.append(delta)
    return merged
