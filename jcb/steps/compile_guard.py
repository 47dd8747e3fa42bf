"""Counting compilations through JAX's own events, so that "nothing compiles after ready" can be checked."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileGuard:
    """Counts programs compiled (or read from the persistent cache) since it was last armed, in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def arm(self) -> None:
        """Start counting from zero: everything from here on is one compile too many."""
        self.count = 0

    def _listen(self, event: str, duration: float, **_: object) -> None:
        del duration
        self.count += event == _EVENT
