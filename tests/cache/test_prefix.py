"""The prefix cache against a dictionary of whole prefixes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jcb.cache.pool import PagePool
from jcb.cache.prefix import PrefixCache

PAGE = 2


def hold(pool, cache, tokens, namespace=""):
    """Allocate and publish the full pages of `tokens`."""
    digests = cache.digests(tokens, namespace, PAGE)
    pages = pool.allocate(len(digests))
    for digest, page in zip(digests, pages, strict=True):
        cache.publish(digest, page)
    return pages


def find(cache, tokens, namespace=""):
    return cache.match(cache.digests(tokens, namespace, PAGE))


def test_finds_the_longest_prefix_of_full_pages():
    pool = PagePool(9)
    cache = PrefixCache(pool)
    pages = hold(pool, cache, [1, 2, 3, 4, 5])
    assert len(pages) == 2
    assert find(cache, [1, 2, 3, 4, 5, 6]) == pages
    assert find(cache, [1, 2, 3, 9]) == pages[:1]
    assert find(cache, [9, 2, 3, 4]) == []


def test_a_page_counts_only_with_all_that_stands_before_it():
    pool = PagePool(9)
    cache = PrefixCache(pool)
    hold(pool, cache, [1, 2, 3, 4])
    assert find(cache, [3, 4]) == []
    assert find(cache, [7, 7, 3, 4]) == []


def test_namespaces_do_not_see_each_other():
    pool = PagePool(9)
    cache = PrefixCache(pool)
    pages = hold(pool, cache, [1, 2], "a")
    assert find(cache, [1, 2], "a") == pages
    assert find(cache, [1, 2], "b") == []
    assert find(cache, [1, 2], "") == []


def test_keys_differ_between_processes_unless_the_root_is_given():
    keys = [PrefixCache(PagePool(3)).digests([1, 2], "", PAGE) for _ in range(2)]
    assert keys[0] != keys[1]
    fixed = [PrefixCache(PagePool(3), root=b"r").digests([1, 2], "", PAGE) for _ in range(2)]
    assert fixed[0] == fixed[1]


def test_the_first_page_of_a_key_stays():
    pool = PagePool(9)
    cache = PrefixCache(pool)
    first = hold(pool, cache, [1, 2])
    second = hold(pool, cache, [1, 2])
    assert find(cache, [1, 2]) == first
    pool.release(second[0])
    assert (pool.num_kept, pool.num_free) == (0, 7)
    cache.check_integrity()


def test_b027_pages_that_were_never_published_return_to_free():
    pool = PagePool(9)
    cache = PrefixCache(pool)
    for page in pool.allocate(2):
        pool.release(page)
    assert pool.num_kept == 0
    assert find(cache, [1, 2, 3, 4]) == []


def test_the_head_of_a_prefix_outlives_its_tail():
    pool = PagePool(4)
    cache = PrefixCache(pool)
    pages = hold(pool, cache, [1, 2, 3, 4, 5, 6])
    for page in reversed(pages):
        pool.release(page)
    pool.allocate(1)
    assert find(cache, [1, 2, 3, 4, 5, 6]) == pages[:2]


def test_a_forgotten_page_stays_with_its_holder_and_then_is_free():
    pool = PagePool(4)
    cache = PrefixCache(pool)
    [page] = hold(pool, cache, [1, 2])
    cache.forget(page)
    assert find(cache, [1, 2]) == []
    pool.release(page)
    assert pool.num_free == 3


def test_check_integrity_finds_a_mark_without_a_key():
    pool = PagePool(4)
    cache = PrefixCache(pool)
    [page] = pool.allocate(1)
    pool.keep(page)
    with pytest.raises(AssertionError, match="mark"):
        cache.check_integrity()


class PrefixMachine(RuleBasedStateMachine):
    """Sequences of two letters share pages; the oracle remembers which prefix stands in which page."""

    @initialize(num_pages=st.integers(3, 9))
    def start(self, num_pages):
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool)
        self.where: dict[tuple, int] = {}
        self.held: list[list[int]] = []
        self.kept: list[int] = []

    def drop(self, page):
        self.where = {prefix: p for prefix, p in self.where.items() if p != page}

    @rule(tokens=st.lists(st.integers(0, 1), max_size=8), namespace=st.sampled_from("ab"), published=st.integers(0, 4))
    def run(self, tokens, namespace, published):
        """A sequence: matches, takes what is missing, publishes the first pages of it."""
        prefixes = [(namespace, *tokens[:stop]) for stop in range(PAGE, len(tokens) + 1, PAGE)]
        hits = self.cache.match(self.cache.digests(tokens, namespace, PAGE))
        expected = []
        for prefix in prefixes:
            if prefix not in self.where:
                break
            expected.append(self.where[prefix])
        assert hits == expected
        idle = sum(page in self.kept for page in hits)
        missing = len(prefixes) - len(hits)
        if missing + idle > self.pool.num_available:
            return
        for page in hits:
            self.pool.share(page)
        self.kept = [page for page in self.kept if page not in hits]
        for _ in range(missing - self.pool.num_free):
            self.drop(self.kept.pop(0))
        pages = hits + self.pool.allocate(missing)
        digests = self.cache.digests(tokens, namespace, PAGE)
        for prefix, digest, page in list(zip(prefixes, digests, pages, strict=True))[len(hits) : published]:
            self.cache.publish(digest, page)
            self.where.setdefault(prefix, page)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data):
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for page in reversed(pages):
            self.pool.release(page)
            if self.pool.refs(page) == 0 and page in self.where.values():
                self.kept.append(page)

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def forget(self, data):
        page = data.draw(st.sampled_from(sorted(self.where.values())))
        self.cache.forget(page)
        self.drop(page)
        self.kept = [other for other in self.kept if other != page]

    @rule()
    def clear(self):
        self.cache.clear()
        self.where.clear()
        self.kept.clear()

    @invariant()
    def agrees(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            self.cache.check_integrity()
            assert len(self.cache) == len(self.where)
            assert self.pool.num_kept == len(self.kept)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
