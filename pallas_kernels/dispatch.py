"""Which implementation of an op runs where.

A backend module has a function named like its op; it refuses what it does not serve by raising
NotImplementedError("why"). "auto" tries the backend of the cache's platform, then XLA, and says once why one was
passed over.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import native

OPS = ("paged_attention", "kv_write", "quantized_dot")
IMPLEMENTATIONS = ("reference", "xla", "cpu", "gpu", "tpu")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """One implementation of one op on one platform, and why it is not used if it is not."""

    op: str
    implementation: str
    available: bool
    reason: str


def _module_name(op: str, implementation: str) -> str:
    return f"pallas_kernels.{op}.{implementation}"


def call(op: str, implementation: str, platform: str, *args: Any, **options: Any) -> Any:
    """Run `op`; "auto" goes on to the next implementation when one refuses these shapes.

    implementation: "auto" or one of IMPLEMENTATIONS. platform: "cpu", "gpu" or "tpu", where the program will run.
    Raises ValueError for an unknown name and NotImplementedError("why") when the one asked for refuses.
    """
    if implementation != "auto":
        return find(op, implementation, platform)(*args, **options)
    for choice in explain(op, platform):
        if choice.available:
            try:
                return _load(choice)(*args, **options)
            except NotImplementedError as refusal:
                _say_refused(op, choice.implementation, str(refusal))
        elif choice.reason == native.why_not():
            _say_refused(op, choice.implementation, choice.reason)
    raise NotImplementedError(f"{op}: no implementation serves these shapes")


def find(op: str, implementation: str, platform: str | None = None) -> Callable[..., Any]:
    """The callable for `implementation` of `op`.

    implementation: "auto" or one of IMPLEMENTATIONS. platform: "cpu", "gpu" or "tpu"; None asks JAX.
    Raises ValueError for an unknown name and NotImplementedError("why") where a backend does not exist here.
    """
    if implementation == "auto":
        return next(_load(c) for c in explain(op, platform) if c.available)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} is not one of auto, {', '.join(IMPLEMENTATIONS)}")
    choice = _choice(op, implementation, platform or jax.default_backend())
    if not choice.available:
        raise NotImplementedError(f"{op}: implementation {implementation!r} cannot run here: {choice.reason}")
    return _load(choice)


def explain(op: str, platform: str | None = None) -> list[Choice]:
    """Every implementation of `op` in the order "auto" tries them on `platform`, with reasons."""
    if op not in OPS:
        raise ValueError(f"{op=} is not one of {', '.join(OPS)}")
    platform = platform or jax.default_backend()
    order = [platform] if platform in IMPLEMENTATIONS else []
    order += [name for name in ("xla", "reference", "cpu", "gpu", "tpu") if name not in order]
    return [_choice(op, name, platform) for name in order]


def _choice(op: str, implementation: str, platform: str) -> Choice:
    if importlib.util.find_spec(_module_name(op, implementation)) is None:
        return Choice(op, implementation, False, f"jcb has no {implementation} backend for {op}")
    if implementation in ("cpu", "gpu", "tpu") and implementation != platform:
        return Choice(op, implementation, False, f"the device is a {platform}")
    if implementation == "cpu" and (reason := native.why_not()):
        return Choice(op, implementation, False, reason)
    return Choice(op, implementation, True, "runs on every platform" if implementation in ("xla", "reference") else "")


def _load(choice: Choice) -> Callable[..., Any]:
    return getattr(importlib.import_module(_module_name(choice.op, choice.implementation)), choice.op)


def some_refused() -> bool:
    """Whether "auto" has passed over a kernel in this process, and said so."""
    return _say_refused.cache_info().currsize > 0


@functools.cache
def _say_refused(op: str, implementation: str, reason: str) -> None:
    """One line for each reason, however many programs meet it."""
    _log.warning("%s: the %s kernel is not used: %s", op, implementation, reason)
