"""jinja2's immutable sandbox with what it lacks: bounds on time and on the size of everything a template makes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_format, do_indent
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_RANGE = 100_000
MAX_EXPONENT = 64
MAX_INDENT = 64

_DEADLINE = "the deadline"
"""A variable that no template can name, since it is not an identifier."""

_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
"""String methods that make text of any length out of a number."""

_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")
_WIDE_BRACES = re.compile(r"\d{5}|:[^}]*\{")
"""Format strings whose fields may be wider than four digits say, or as wide as a value says."""

_UNBOUNDED_FILTERS = ("center", "wordwrap", "xmlattr")
_UNBOUNDED_GLOBALS = ("cycler", "lipsum")


class BoundedTemplate:
    """A compiled template. Raises whatever jinja2 and the called functions raise; SecurityError when over a bound."""

    def __init__(
        self,
        source: str,
        *,
        functions: Mapping[str, Callable[..., Any]],
        filters: Mapping[str, Callable[..., Any]],
        max_output: int,
        max_seconds: float,
    ) -> None:
        environment = _BoundedEnvironment(max_output)
        environment.filters.update(filters)
        self._template = environment.from_string(source)
        self._environment = environment
        self._functions = dict(functions)
        self._max_seconds = max_seconds

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of `variables`."""
        deadline = _Deadline(self._max_seconds)
        parts = self._template.generate({**self._functions, **variables, "range": deadline.range, _DEADLINE: deadline})
        return self._environment.concat(deadline.watch(parts))


class _Deadline:
    """A moment after which the template is stopped, asked at every call, output and step of a range."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise SecurityError("the template took too long")

    def range(self, *bounds: int) -> _WatchedRange:
        numbers = range(*bounds)
        if len(numbers) > MAX_RANGE:
            raise SecurityError(f"a range of {len(numbers)} is over the limit of {MAX_RANGE}")
        return _WatchedRange(numbers, self)

    def watch(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check()
            yield item


class _WatchedRange:
    """A range that looks at the clock while it is gone through."""

    def __init__(self, numbers: range, deadline: _Deadline) -> None:
        self._numbers = numbers
        self._deadline = deadline

    def __iter__(self) -> Iterator[int]:
        return self._deadline.watch(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_length: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=["jinja2.ext.loopcontrols"])
        self._max_length = max_length
        self.concat = self._bounded_concat  # ty: ignore[invalid-assignment]
        self.filters["concat_"] = self._concat_values
        self.filters["format"] = _format
        self.filters["indent"] = _indent
        for name in _UNBOUNDED_FILTERS:
            self.filters.pop(name, None)
        for name in _UNBOUNDED_GLOBALS:
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _ConcatToFilter().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _PADDING)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(value.__self__):
            raise SecurityError("a format makes its fields too wide")
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._check_clock(__context)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._check_clock(context)
        if operator == "*":
            self._check_length(_repeated_length(left, right))
        elif operator == "**" and not (abs(right) <= MAX_EXPONENT and abs(left) <= 1 << 64):
            raise SecurityError(f"{operator} is over the limit")
        elif operator == "%" and isinstance(left, str):
            _check_percent(left)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _check_clock(self, context: Context) -> None:
        deadline = context.resolve_or_missing(_DEADLINE)
        if isinstance(deadline, _Deadline):
            deadline.check()

    def _check_length(self, length: int) -> None:
        if length > self._max_length:
            raise SecurityError(f"the template made more than {self._max_length} characters")

    def _bounded_concat(self, parts: Iterable[str]) -> str:
        kept: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            self._check_length(length)
            kept.append(part)
        return "".join(kept)

    def _concat_values(self, values: Iterable[Any]) -> str:
        return self._bounded_concat(map(str, values))


class _ConcatToFilter(NodeTransformer):
    """Turns `a ~ b`, which cannot be intercepted, into a filter call, which is bounded."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        values = nodes.List([self.visit(each) for each in node.nodes], lineno=node.lineno)
        return nodes.Filter(values, "concat_", [], [], None, None, lineno=node.lineno)


def _check_percent(form: str) -> None:
    if _WIDE_PERCENT.search(form):
        raise SecurityError("a format makes its fields too wide")


def _format(form: str, *args: Any, **kwargs: Any) -> str:
    _check_percent(form)
    return do_format(form, *args, **kwargs)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (len(width) if isinstance(width, str) else width) > MAX_INDENT:
        raise SecurityError(f"an indent of more than {MAX_INDENT}")
    return do_indent(text, width, first, blank)


def _repeated_length(left: Any, right: Any) -> int:
    """Length of `left * right` when one is a sequence, else 0."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            return len(sequence) * max(times, 0)
    return 0
