"""The prefix cache: full pages of tokens found again by what they hold and all that stands before it.

The key of a page is a SHA-256 chained over the pages before it and rooted in (a random value of this process,
the namespace), so equal keys mean equal prefixes of one namespace and nobody outside can guess one.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterable, Sequence

from jcb.cache.pool import PagePool


class PrefixCache:
    """Digest of a full page → the page that holds it; pages nobody holds stay until the pool needs them.

    It never computes on its own what a sequence holds: callers keep the digests of a sequence and extend them
    page by page with `digest`, so every page is hashed once.
    """

    def __init__(self, pool: PagePool, *, root: bytes | None = None) -> None:
        self._pool = pool
        self._root = secrets.token_bytes(32) if root is None else hashlib.sha256(root).digest()
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        pool.on_evict = self._drop

    def __len__(self) -> int:
        return len(self._pages)

    def root(self, namespace: str) -> bytes:
        """Where the chain of a namespace starts."""
        return hashlib.sha256(self._root + namespace.encode()).digest()

    @staticmethod
    def digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Key of the page that holds `token_ids` after the page whose key is `parent`."""
        return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()

    def digests(self, token_ids: Sequence[int], namespace: str, page_size: int) -> list[bytes]:
        """Keys of all full pages of `token_ids`."""
        chain = [self.root(namespace)]
        for stop in range(page_size, len(token_ids) + 1, page_size):
            chain.append(self.digest(chain[-1], token_ids[stop - page_size : stop]))
        return chain[1:]

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Pages of the longest prefix that is here. The caller shares those it uses before it allocates."""
        pages = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Pages of those keys that are here, whether the ones before them are or not."""
        return [self._pages[digest] for digest in digests if digest in self._pages]

    def publish(self, digest: bytes, page: int) -> None:
        """Make a held page findable. The step that fills it has been ordered; the first page of a key stays."""
        if digest in self._pages:
            return
        assert page not in self._digests, f"{page=} is published under another key"
        self._pool.keep(page)
        self._pages[digest] = page
        self._digests[page] = digest

    def forget(self, page: int) -> None:
        """What `page` holds must not be found again; its holders keep it."""
        if page in self._digests:
            self._drop(page)
            self._pool.unkeep(page)

    def clear(self) -> None:
        """Forget everything; kept pages become free."""
        for page in tuple(self._digests):
            self.forget(page)

    def _drop(self, page: int) -> None:
        del self._pages[self._digests.pop(page)]

    def check_integrity(self) -> None:
        """Both directions agree with each other and with the pool's marks."""
        assert {page: digest for digest, page in self._pages.items()} == self._digests, "the two maps differ"
        for page in range(self._pool.num_pages):
            assert self._pool.is_marked(page) == (page in self._digests), f"mark and key of {page=} differ"
