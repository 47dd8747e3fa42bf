"""Equal shares for users, whatever each of them sends: start-time fair queueing over tokens."""

from __future__ import annotations

_SLACK = 64


class Shares:
    """Gives every request a place: where its user's turn begins, in tokens that an equal share has been served.

    A user who has sent nothing lately begins where the others are, so its next request waits for at most one of every
    other user; one who sends much queues behind itself. Only users who are ahead are remembered.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}
        self._swept = 0  # users left by the last sweep

    def claim(self, user: str, tokens: int) -> float:
        """A place for a request of so many tokens."""
        place = max(self._next.get(user, 0.0), self._now)
        self._next[user] = place + tokens
        return place

    def charge(self, user: str, tokens: int) -> None:
        """Count tokens that were not known at the claim: the answer's."""
        self._next[user] = max(self._next.get(user, 0.0), self._now) + tokens

    def begin(self, place: float) -> None:
        """The request with this place begins; those who are not ahead of it are forgotten."""
        self._now = max(self._now, place)
        if len(self._next) > 2 * self._swept + _SLACK:
            self._next = {user: ahead for user, ahead in self._next.items() if ahead > self._now}
            self._swept = len(self._next)
