"""The page pool against a plain model of it: three places, counted by hand."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jcb.cache.pool import PagePool


def test_page_zero_is_never_handed_out():
    pool = PagePool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_available == 0
    pool.check_integrity()


def test_a_pool_of_the_dummy_alone_is_refused():
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1)


def test_more_than_available_is_a_broken_promise():
    with pytest.raises(AssertionError, match="available"):
        PagePool(3).allocate(3)


def test_b167_reuse_order_without_a_cache():
    pool = PagePool(8)
    pages = pool.allocate(5)
    for page in reversed(pages[1:4]):  # a sequence gives its pages back last page first
        pool.release(page)
    assert pool.allocate(5) == [2, 3, 4, 6, 7]


def test_b167_reuse_order_with_a_cache():
    evicted: list[int] = []
    pool = PagePool(8)
    pool.on_evict = evicted.append
    pages = pool.allocate(5)
    for page in (2, 3, 4):
        pool.keep(page)
    for page in reversed(pages):
        pool.release(page)
    assert (pool.num_free, pool.num_kept) == (4, 3)
    assert pool.allocate(7) == [1, 5, 6, 7, 4, 3, 2]
    assert evicted == [4, 3, 2]


def test_a_shared_page_stays_until_its_last_holder_leaves():
    pool = PagePool(3)
    [page] = pool.allocate(1)
    pool.share(page)
    pool.release(page)
    assert pool.num_held == 1
    pool.release(page)
    assert pool.num_held == 0


def test_check_integrity_finds_a_lost_page():
    pool = PagePool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="places"):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages):
        self.pool = PagePool(num_pages)
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append
        self.free = list(range(num_pages - 1, 0, -1))
        self.kept: list[int] = []
        self.marked: set[int] = set()
        self.refs: dict[int, int] = {}

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, len(self.free) + len(self.kept)))
        expected = []
        self.evicted.clear()
        evicted = []
        for _ in range(count):
            if self.free:
                expected.append(self.free.pop())
            else:
                evicted.append(self.kept.pop(0))
                expected.append(evicted[-1])
        self.marked -= set(evicted)
        self.refs |= dict.fromkeys(expected, 1)
        assert self.pool.allocate(count) == expected
        assert self.evicted == evicted

    @precondition(lambda self: self.refs or self.kept)
    @rule(data=st.data())
    def share(self, data):
        page = data.draw(st.sampled_from([*self.refs, *self.kept]))
        self.pool.share(page)
        if page in self.kept:
            self.kept.remove(page)
        self.refs[page] = self.refs.get(page, 0) + 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(list(self.refs)))
        self.pool.release(page)
        self.refs[page] -= 1
        if self.refs[page] == 0:
            del self.refs[page]
            (self.kept if page in self.marked else self.free).append(page)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def keep(self, data):
        page = data.draw(st.sampled_from(list(self.refs)))
        self.pool.keep(page)
        self.marked.add(page)

    @precondition(lambda self: self.marked)
    @rule(data=st.data())
    def unkeep(self, data):
        page = data.draw(st.sampled_from(sorted(self.marked)))
        self.pool.unkeep(page)
        self.marked.remove(page)
        if page in self.kept:
            self.kept.remove(page)
            self.free.append(page)

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_kept == len(self.kept)
        assert self.pool.num_held == len(self.refs)
        assert all(self.pool.refs(page) == count for page, count in self.refs.items())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
