"""A priority queue whose entries can be removed or moved at any time."""

from __future__ import annotations

import heapq
from typing import Any

_SLACK = 64


class KeyedHeap:
    """Names in the order of their keys. Removal only marks: stale entries are dropped when they surface,
    and all at once when they outnumber the live ones, so memory follows the live names.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Any] = {}
        self._heap: list[tuple[Any, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def push(self, name: str, key: Any) -> None:
        """Add `name`, or move it to `key`."""
        self._keys[name] = key
        heapq.heappush(self._heap, (key, name))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, name) for name, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """Remove `name` if it is here."""
        self._keys.pop(name, None)
        if not self._keys:
            self._heap.clear()

    def first(self) -> tuple[Any, str] | None:
        """The smallest key and its name, left in place; None when empty."""
        while self._heap:
            key, name = self._heap[0]
            if self._keys.get(name) == key:
                return key, name
            heapq.heappop(self._heap)
        return None

    def first_few(self, count: int) -> list[str]:
        """The names of the `count` smallest keys, left in place."""
        taken: list[tuple[Any, str]] = []
        while len(taken) < count and self.first() is not None:
            taken.append(heapq.heappop(self._heap))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return [name for _, name in taken]
