"""Finds stop strings in text that arrives in pieces (an Aho-Corasick automaton over characters)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Reads text once, character by character, and finds the stop string that is completed first.

    Of stop strings completed by the same character the longest, which began first, is found. Neither the order of
    the stop strings nor how the text is cut into pieces changes the answer. After a match it must not be fed again.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        # Node 0 is the root. depths[node]: characters of the longest beginning of a stop string that ends the text.
        self._next: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._matches: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fails = self._link()
        self._first_characters = frozenset(self._next[0])
        self._node = 0

    @property
    def held(self) -> int:
        """How many of the last characters read may yet turn out to begin a stop string."""
        return self._depths[self._node]

    def restart(self) -> None:
        """Forget what was read: no stop string begins before here."""
        self._node = 0

    def feed(self, text: str) -> tuple[str, int] | None:
        """Read `text`. Returns (stop string, index in `text` just behind it) when one is completed, else None."""
        node = self._node
        if node == 0 and self._first_characters.isdisjoint(text):
            return None
        for index, character in enumerate(text):
            while character not in self._next[node] and node:
                node = self._fails[node]
            node = self._next[node].get(character, 0)
            match = self._matches[node]
            if match is not None:
                self._node = 0
                return match, index + 1
        self._node = node
        return None

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._depths.append(self._depths[node] + 1)
                self._matches.append(None)
            node = self._next[node][character]
        self._matches[node] = stop

    def _link(self) -> list[int]:
        """Failure links, breadth first; a node also matches what its failure link matches, unless it has its own."""
        fails = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            if self._matches[node] is None:
                self._matches[node] = self._matches[fails[node]]
            for character, child in self._next[node].items():
                fail = fails[node]
                while fail and character not in self._next[fail]:
                    fail = fails[fail]
                fails[child] = self._next[fail].get(character, 0)
                queue.append(child)
        return fails
