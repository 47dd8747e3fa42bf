"""Two interpreters for chat templates that give the same text: minijinja, and jinja2's sandbox where it is absent.

A template comes with a model, so it is not trusted: it can reach no file, no Python object and no other template, and
what it may spend is bounded. minijinja counts every instruction and every character it copies against one allowance
("fuel"). jinja2 cannot; there `jcb.text.bounded_jinja2` checks the clock and the size of what is made instead.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Protocol

from jcb.checkpoint.errors import printable

MAX_OUTPUT = 16 * 1024 * 1024
"""Most characters a template may produce."""

FUEL = 5_000_000
"""minijinja's allowance for one rendering: a chat of 4 MiB takes about a fifth, an endless loop under a second."""

MAX_SECONDS = 2.0
"""jinja2's allowance for one rendering."""


class TemplateError(Exception):
    """A template that cannot be read or rendered, or that refuses its messages. The text is for the caller."""


class RefusedByTemplate(Exception):
    """Raised by a template itself, through raise_exception()."""


class TemplateEngine(Protocol):
    """One template, ready to render."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; TemplateError on any failure. Lists and dicts must be frozen (`jcb.text.frozen`)."""
        ...


def make_engine(source: str, *, clock: Callable[[], datetime] = datetime.now) -> TemplateEngine:
    """The engine for `source`: minijinja where it is installed and bounds what the template does, else jinja2.

    `clock` answers a template that asks for today's date.
    """
    fits_minijinja = importlib.util.find_spec("minijinja") is not None and not _calls_format(source)
    return (MiniJinjaEngine if fits_minijinja else Jinja2Engine)(source, clock)


class MiniJinjaEngine:
    """A template in minijinja."""

    def __init__(self, source: str, clock: Callable[[], datetime] = datetime.now) -> None:
        import minijinja

        if _calls_format(source):
            raise TemplateError("the chat template cannot be read: str.format is not bounded in minijinja")
        self._error = minijinja.TemplateError
        self._environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            debug=False,
            fuel=FUEL,
            auto_escape_callback=_no_escape,
            filters={"tojson": to_json},
            globals=_globals(clock),
        )
        self._environment.remove_global("debug")
        try:
            self._environment.add_template("chat", _without_training_tags(source))
        except self._error as error:
            raise TemplateError(f"the chat template cannot be read: {_first_line(error)}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; TemplateError on any failure."""
        try:
            text = self._environment.render_template("chat", **variables)
        except RefusedByTemplate as error:
            raise TemplateError(_first_line(error)) from error
        except (self._error, ArithmeticError, RecursionError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template failed: {_first_line(error)}") from error
        if len(text) > MAX_OUTPUT:
            raise TemplateError(f"the chat template made more than {MAX_OUTPUT} characters")
        return text


class Jinja2Engine:
    """A template in jinja2's immutable sandbox."""

    def __init__(self, source: str, clock: Callable[[], datetime] = datetime.now) -> None:
        from jcb.text.bounded_jinja2 import BoundedTemplate

        try:
            self._template = BoundedTemplate(
                _without_training_tags(source),
                functions=_globals(clock),
                filters={"tojson": to_json},
                max_length=MAX_OUTPUT,
                max_seconds=MAX_SECONDS,
            )
        except Exception as error:  # the compiler raises more than its own errors on odd input
            raise TemplateError(f"the chat template cannot be read: {_first_line(error)}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; TemplateError on any failure."""
        try:
            return self._template.render(variables)
        except RefusedByTemplate as error:
            raise TemplateError(_first_line(error)) from error
        except Exception as error:  # a template raises whatever the methods it calls raise
            raise TemplateError(f"the chat template failed: {_first_line(error)}") from error


def to_json(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, without the HTML escaping that both engines add by default."""
    if indent is not None and not 0 <= indent <= 16:
        raise RefusedByTemplate(f"tojson: {indent=} must be 0 to 16")
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def _globals(clock: Callable[[], datetime]) -> dict[str, Callable[[str], str]]:
    """The two functions that chat templates expect."""

    def raise_exception(message: str) -> str:
        raise RefusedByTemplate(str(message))

    def strftime_now(form: str) -> str:
        return clock().strftime(str(form)[:64])

    return {"raise_exception": raise_exception, "strftime_now": strftime_now}


def _without_training_tags(source: str) -> str:
    """The template without `{% generation %}` marks, which only training reads and neither engine knows."""
    return re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source)


def _calls_format(source: str) -> bool:
    """True when the template calls str.format, whose field widths minijinja does not count against its fuel."""
    return re.search(r"\.\s*format\b", source) is not None


def _no_escape(name: str) -> bool:
    return False


def _first_line(error: BaseException) -> str:
    """The first line of an error, short enough to send."""
    return printable((str(error) or type(error).__name__).partition("\n")[0], 300)
