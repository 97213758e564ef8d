"""The page pool conserves pages whatever is taken, shared, kept, dropped and released."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rekindle._src.kvcache.pool import PagePool, pages_for


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(length: int, pages: int) -> None:
    assert pages_for(length, 16) == pages


def test_the_scratch_page_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert not pool.free
    with pytest.raises(AssertionError, match="1 pages asked for, 0 free"):
        pool.take(1)


def test_a_page_is_free_after_its_last_reference() -> None:
    pool = PagePool(3)
    pages = pool.take(1)
    pool.share(pages)
    pool.release(pages)
    assert (pool.free, pool.held, pool.cached) == (1, 1, 0)
    pool.release(pages)
    assert (pool.free, pool.held, pool.cached) == (2, 0, 0)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(pages)


def test_a_kept_page_is_cached_once_nobody_holds_it() -> None:
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.keep([page])
    assert (pool.held, pool.cached, pool.cache_refs) == (1, 0, 1)
    pool.release([page])
    assert (pool.held, pool.cached, pool.cache_refs) == (0, 1, 1)
    pool.share([page])
    assert (pool.held, pool.cached) == (1, 0)
    pool.release([page])
    with pytest.raises(AssertionError, match="released too often"):
        pool.release([page])  # the reference that is left is the cache's
    pool.drop(page)
    assert (pool.free, pool.cache_refs) == (2, 0)


def test_free_pages_can_not_be_shared_or_kept() -> None:
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="sharing free pages"):
        pool.share([1])
    with pytest.raises(AssertionError, match="a free page is kept"):
        pool.keep([1])


def test_the_integrity_check_finds_a_wrong_count() -> None:
    pool = PagePool(4)
    expected = np.zeros(4, np.int32)
    (page,) = pool.take(1)
    with pytest.raises(AssertionError, match=r"pages \[1\] have \[1\] references, expected \[0\]"):
        pool.check_integrity(expected)
    expected[page] = 1
    pool.check_integrity(expected)


class PoolMachine(RuleBasedStateMachine):
    """Against a model of plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.holders: list[list[int]] = []
        self.kept: set[int] = set()

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        if count <= self.pool.free:
            self.holders.append(self.pool.take(count))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = list(data.draw(st.sampled_from(self.holders)))
        self.pool.share(np.array(pages, np.int32))
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        pages = [page for page in data.draw(st.sampled_from(self.holders)) if page not in self.kept]
        self.pool.keep(pages)
        self.kept |= set(pages)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.drop(page)
        self.kept.remove(page)

    @invariant()
    def conserves(self) -> None:
        expected = np.zeros(self.pool.num_pages, np.int32)
        for pages in self.holders:
            expected[pages] += 1
        held = set(np.flatnonzero(expected).tolist())
        expected[list(self.kept)] += 1
        self.pool.check_integrity(expected)
        assert self.pool.held == len(held)
        assert self.pool.cached == len(self.kept - held)
        assert self.pool.free + self.pool.held + self.pool.cached == self.pool.total == 8


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
