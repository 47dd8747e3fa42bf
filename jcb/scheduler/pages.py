"""Pages of sequences: the pool and the prefix cache seen through the records that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jcb.cache.pool import PagePool
from jcb.cache.prefix import PrefixCache
from jcb.config import Limits
from jcb.scheduler.record import Record


class PageLedger:
    """Gives pages to records and takes them back. `Record.pages` is changed here only."""

    def __init__(self, limits: Limits, *, enable_prefix_caching: bool, root: bytes | None) -> None:
        self._page_size = limits.page_size
        self._pool = PagePool(limits.num_pages)
        self._cache = PrefixCache(self._pool, root=root) if enable_prefix_caching else None
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_available(self) -> int:
        return self._pool.num_available

    def keys(self, record: Record) -> list[bytes]:
        """Prefix-cache keys of the pages it could share, in order. One token at least is left to compute; a request
        that wants log-probabilities of its prompt computes all of it.
        """
        if self._cache is None or record.request.params.prompt_logprobs is not None:
            return []
        count = (record.num_tokens - 1) // self._page_size
        self._extend_digests(self._cache, record, count)
        return record.digests[:count]

    def match(self, keys: list[bytes]) -> list[int]:
        """Cached pages of the longest prefix of `keys`."""
        return [] if self._cache is None else self._cache.match(keys)

    def keys_in_progress(self, record: Record, q_len: int) -> list[bytes]:
        """Keys of the full pages of known tokens that the next `q_len` tokens of the record write to."""
        if self._cache is None:
            return []
        stop = min(-(-(record.num_computed + q_len) // self._page_size), record.num_tokens // self._page_size)
        self._extend_digests(self._cache, record, stop)
        return record.digests[record.num_computed // self._page_size : stop]

    def price(self, hits: list[int], num_pages: int) -> int:
        """Available pages that `num_pages` pages would use up if they began with `hits`."""
        idle = sum(self._pool.refs(page) == 0 for page in hits)
        return num_pages - len(hits) + idle

    def adopt(self, record: Record, hits: list[int]) -> None:
        """Begin a residency with cached pages."""
        for page in hits:
            self._pool.share(page)
        record.pages = hits
        record.num_published = len(hits)
        record.num_computed = len(hits) * self._page_size
        self.num_queried_tokens += record.num_tokens
        self.num_hit_tokens += record.num_computed

    def grow(self, record: Record, count: int) -> None:
        """Add `count` pages that are known to be available."""
        record.pages += self._pool.allocate(count)

    def drop(self, record: Record) -> None:
        """Take all pages back. The last goes first: a tail is less likely to be wanted again than its head."""
        for page in reversed(record.pages):
            self._pool.release(page)
        record.pages = []
        record.page_table = ()
        record.num_computed = 0

    def publish(self, record: Record) -> None:
        """Make its full pages findable. Call it for planned steps only; a page with a token unknown so far waits."""
        if self._cache is None or record.num_computed < (record.num_published + 1) * self._page_size:
            return
        known = len(record.request.prompt_token_ids) + len(record.output_token_ids)
        full = min(record.num_computed, known) // self._page_size
        if full <= record.num_published:
            return
        self._extend_digests(self._cache, record, full)
        for index in range(record.num_published, full):
            self._cache.publish(record.digests[index], record.pages[index])
        record.num_published = full

    def condemn(self, record: Record) -> None:
        """Nobody may find what its pages hold, nor those it had to give up meanwhile."""
        if self._cache is not None:
            for page in {*record.pages, *self._cache.find(record.digests)}:
                self._cache.forget(page)

    def clear(self) -> None:
        """The device's cache is lost: every page is free, none can be found. No record holds one."""
        if self._cache is not None:
            self._cache.clear()
        self._pool.reset()

    def cached(self) -> list[int]:
        """Pages that nobody holds but the prefix cache can find."""
        return self._pool.kept()

    def stats(self) -> dict[str, int]:
        return {
            "pages_total": self._pool.num_pages - 1,
            "pages_used": self._pool.num_held,
            "pages_free": self._pool.num_free,
            "pages_cached": self._pool.num_kept,
            "prefix_queried_tokens": self.num_queried_tokens,
            "prefix_hit_tokens": self.num_hit_tokens,
        }

    def check_integrity(self, holders: Iterable[Record]) -> None:
        """Pool and cache are sound, and the references are exactly those of `holders`."""
        self._pool.check_integrity()
        if self._cache is not None:
            self._cache.check_integrity()
        held = Counter(page for record in holders for page in record.pages)
        for page in range(self._pool.num_pages):
            assert self._pool.refs(page) == held[page], (
                f"{page=} has {self._pool.refs(page)} references, not {held[page]}"
            )

    def _extend_digests(self, cache: PrefixCache, record: Record, count: int) -> None:
        size = self._page_size
        digests = record.digests
        while len(digests) < count:
            parent = digests[-1] if digests else cache.root(record.request.namespace)
            start = len(digests) * size
            digests.append(cache.digest(parent, record.tokens(start, start + size)))
