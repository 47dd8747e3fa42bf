"""Counting compilations through JAX's own events, so that "nothing compiles after ready" can be checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileGuard:
    """Counts programs compiled (or read from the persistent cache) in this process since it was last armed.

    on_compile is called for each of them, and never before the first arming.
    """

    def __init__(self, on_compile: Callable[[], object] | None = None) -> None:
        self.count = 0
        self._armed = False
        self._on_compile = on_compile
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def arm(self) -> None:
        """Start counting from zero: everything from here on is one compile too many."""
        self.count = 0
        self._armed = True

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event != _EVENT or not self._armed:
            return
        self.count += 1
        if self._on_compile is not None:
            self._on_compile()
