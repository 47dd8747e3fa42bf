"""What the fuzzer of test_schemathesis.py is told beyond its settings; loaded into its own process.

Its JSON Schema validator is written in Rust and cannot hold a lone surrogate, which ends the run where one is drawn.
Here such a value is judged with U+FFFD in the surrogate's place: one character for one, so that types, lengths and
patterns come out the same.

Its steering towards accepted requests is off: most of its time goes into shrinking requests that already passed (three
quarters of it for POST /tokenize). Every example is drawn afresh instead.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import hypothesis
from schemathesis.specs.openapi import negative

SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(value: Any) -> Any:
    """The same value with U+FFFD for every surrogate, in keys too."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value


class SurrogateJudge:
    """A validator that also judges values with lone surrogates."""

    def __init__(self, validator: Any):
        self._validator = validator

    def is_valid(self, value: Any) -> bool:
        try:
            return self._validator.is_valid(value)
        except UnicodeEncodeError:
            return self._validator.is_valid(without_surrogates(value))


def judging_surrogates(make: Any) -> Any:
    """`make`, a cached function that gives a validator, giving a judge of surrogates."""

    @functools.wraps(make)
    def made(*args: Any) -> SurrogateJudge:
        return SurrogateJudge(make(*args))

    made.cache_clear = make.cache_clear  # ty: ignore[unresolved-attribute]
    return made


def drawn_afresh(observation: float, *, label: str = "") -> None:  # the signature of hypothesis.target
    """Steers nothing."""


for name in ("get_validator", "get_real_validator"):
    setattr(negative, name, judging_surrogates(getattr(negative, name)))
hypothesis.target = drawn_afresh  # ty: ignore[invalid-assignment]
