"""jinja2's immutable sandbox with what it lacks: bounds on time and on the size of everything a template makes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_format, do_indent
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_RANGE = 100_000
MAX_EXPONENT = 64
MAX_INDENT = 64

_DEADLINE = "the deadline"
"""A variable that no template can name, since it is not an identifier."""

_SAFE_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape",
    "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "truncate", "unique",
    "upper", "urlencode", "wordcount",
)  # fmt: skip
"""Filters whose result is no larger than a small multiple of what goes in."""

_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "translate", "zfill"})
"""String methods that make text of any length."""

_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")
_WIDE_BRACES = re.compile(r"\d{5}|\{[^{}]*:[^{}]*\{")
"""Format strings with fields of more than four digits' width, or as wide as a value says."""


class BoundedTemplate:
    """A compiled template. Raises whatever jinja2 and the called functions raise; SecurityError when over a bound."""

    def __init__(
        self,
        source: str,
        *,
        functions: Mapping[str, Callable[..., Any]],
        filters: Mapping[str, Callable[..., Any]],
        max_length: int,
        max_seconds: float,
    ) -> None:
        self._environment = _BoundedEnvironment(max_length, filters)
        self._template = self._environment.from_string(source)
        self._functions = dict(functions)
        self._max_seconds = max_seconds

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of `variables`."""
        deadline = _Deadline(self._max_seconds)
        given = {**self._functions, **variables, "range": deadline.range, _DEADLINE: deadline}
        return self._environment.concat(deadline.watch(self._template.generate(given)))


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
    """The sandbox; `max_length` bounds every string and list that a template makes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_length: int, filters: Mapping[str, Callable[..., Any]]) -> None:
        extensions = ["jinja2.ext.loopcontrols", "jinja2.ext.do"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=extensions)
        self._max_length = max_length
        self.concat = self._bounded_concat  # ty: ignore[invalid-assignment]
        self.filters = {name: FILTERS[name] for name in _SAFE_FILTERS if name in FILTERS} | {
            _ConcatToFilter.NAME: self._concat_values,
            "format": self._format,
            "indent": _indent,
            "join": self._join,
            "replace": self._replace,
            **filters,
        }
        for name in ("cycler", "lipsum"):
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _ConcatToFilter().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _PADDING)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            if _WIDE_BRACES.search(value.__self__):
                raise SecurityError("a format makes its fields too wide")
            self._check_fields(value.__self__, "{", (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._check_clock(__context)
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and args:
            if __obj.__name__ == "join":
                args = (__self._join_checked(args[0], text),)
            elif __obj.__name__ == "replace" and len(args) > 1:
                __self._check_replaced(text, args[0], args[1])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._check_clock(context)
        if operator == "*":
            self._check_length(_repeated_length(left, right))
        elif operator == "**" and not (abs(right) <= MAX_EXPONENT and abs(left) <= 1 << 64):
            raise SecurityError("a power is over the limit")
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right if isinstance(right, tuple) else (right,))
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

    def _check_fields(self, form: str, sign: str, values: Iterable[Any]) -> None:
        longest = max((len(value if isinstance(value, str) else str(value)) for value in values), default=0)
        self._check_length(len(form) + form.count(sign) * longest)

    def _check_percent(self, form: str, values: Iterable[Any]) -> None:
        if _WIDE_PERCENT.search(form):
            raise SecurityError("a format makes its fields too wide")
        self._check_fields(form, "%", values)

    def _check_replaced(self, text: str, old: Any, new: Any) -> None:
        self._check_length(len(text) + text.count(str(old)) * len(str(new)))

    def _join_checked(self, values: Iterable[Any], separator: str) -> list[Any]:
        kept: list[Any] = []
        length = 0
        for value in values:
            length += len(separator) + len(str(value))
            self._check_length(length)
            kept.append(value)
        return kept

    def _bounded_concat(self, parts: Iterable[str]) -> str:
        return "".join(self._join_checked(parts, ""))

    def _concat_values(self, values: Iterable[Any]) -> str:
        return self._bounded_concat(map(str, values))

    def _format(self, form: str, *args: Any, **kwargs: Any) -> str:
        self._check_percent(form, (*args, *kwargs.values()))
        return do_format(form, *args, **kwargs)

    def _join(self, values: Iterable[Any], separator: str = "") -> str:
        return str(separator).join(map(str, self._join_checked(values, str(separator))))

    def _replace(self, text: Any, old: str, new: str) -> str:
        self._check_replaced(str(text), old, new)
        return str(text).replace(old, new)


class _ConcatToFilter(NodeTransformer):
    """Turns `a ~ b`, which cannot be intercepted, into a filter call, which is bounded."""

    NAME = "the operator ~"

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        values = nodes.List([self.visit(each) for each in node.nodes], lineno=node.lineno)
        return nodes.Filter(values, self.NAME, [], [], None, None, lineno=node.lineno)


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
