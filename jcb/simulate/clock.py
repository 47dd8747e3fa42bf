"""Time that passes only when told to."""

from __future__ import annotations


class VirtualClock:
    """Seconds since its start. Calling it reads it, so it stands in for `time.monotonic`."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        if not seconds >= 0:
            raise ValueError(f"{seconds=} must not be negative: time does not run backwards")
        self._now += seconds

    def advance_to(self, when: float) -> None:
        """Let time pass until `when`; nothing happens if that is over."""
        self._now = max(self._now, when)
