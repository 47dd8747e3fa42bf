"""The page pool: which pages are free, which are held and by how many, which are only kept.

A page is in exactly one of three places. Held: somebody counts on it (reference count above 0).
Kept: nobody holds it but the prefix cache can still find it, so it is reused last. Free: neither.
"""

from __future__ import annotations

from collections.abc import Callable


def _ignore(page: int) -> None:
    """What the eviction of a page means where there is no prefix cache."""


class PagePool:
    """Reference counts for the pages 1 … num_pages - 1; page 0 is the dummy and is never handed out.

    Order of reuse, with and without a prefix cache: free pages first, the last one released leading
    (a fresh pool hands out 1, 2, 3, …), then kept pages, the one released longest ago leading.
    `on_evict` hears of each kept page before it is handed out again.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"{num_pages=} must be at least 2: page 0 is a dummy")
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] = _ignore
        self.reset()

    def reset(self) -> None:
        """Every page free, in the order of a fresh pool. What the pages held is lost."""
        self._free = list(range(self.num_pages - 1, 0, -1))  # a stack: the end is handed out first
        self._kept: dict[int, None] = {}  # insertion order is release order
        self._keep = bytearray(self.num_pages)  # 1: keep the page when its last holder lets go
        self._refs = [0] * self.num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free or kept."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        return self.num_pages - 1 - self.num_available

    def kept(self) -> list[int]:
        """Pages nobody holds that can still be found, the next to be reused first."""
        return list(self._kept)

    def refs(self, page: int) -> int:
        """How many hold `page`."""
        return self._refs[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages, each held once. The caller has made sure that so many are available."""
        assert 0 <= count <= self.num_available, f"{count=} pages of {self.num_available} available"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is held or kept."""
        assert self._refs[page] > 0 or page in self._kept, f"{page=} is free and cannot be shared"
        if self._refs[page] == 0:
            del self._kept[page]
        self._refs[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one leaves the page kept if it was marked, else free."""
        assert self._refs[page] > 0, f"{page=} is not held"
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if self._keep[page]:
            self._kept[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """Mark a held page: once released it stays findable until the room is needed."""
        assert self._refs[page] > 0, f"{page=} is not held and cannot be kept"
        self._keep[page] = 1

    def unkeep(self, page: int) -> None:
        """Take the mark away; a page that was only kept becomes free."""
        self._keep[page] = 0
        if page in self._kept:
            del self._kept[page]
            self._free.append(page)

    def is_marked(self, page: int) -> bool:
        """Whether `keep` was called for what the page holds now."""
        return bool(self._keep[page])

    def _evict(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page]
        self._keep[page] = 0
        self.on_evict(page)
        return page

    def check_integrity(self) -> None:
        """Every page is in exactly one place, and the marks and counts agree with it."""
        free, kept = set(self._free), set(self._kept)
        held = {page for page in range(self.num_pages) if self._refs[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(kept) + len(held) == self.num_pages - 1, "a page is in two places"
        assert free | kept | held == set(range(1, self.num_pages)), "a page is lost, or page 0 was handed out"
        assert all(refs >= 0 for refs in self._refs), "a reference count is negative"
        assert all(self._keep[page] for page in kept), "a kept page is not marked"
        assert not any(self._keep[page] for page in free), "a free page is marked"
