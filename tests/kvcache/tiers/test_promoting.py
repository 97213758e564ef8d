"""Pages in host memory go to free device pages before anybody asks, and leave them like any others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from helpers.stored_pages import IDENTITY, payload_of
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import IntArray, LostPage, PageMove
from rekindle._src.kvcache import CostModel, HostTier, PagePool, PrefixCache, Tiers
from rekindle._src.kvcache.tiers import restoring
from rekindle._src.kvcache.tiers.restoring import promote

SIZE = 4
LONG, OTHER = (np.repeat(np.array(values, np.int32), SIZE) for values in ((1, 2, 3, 4), (1, 2, 7)))


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "MIN_BYTES", 0)


def grafted(pages: int, *, missing: int = 0) -> tuple[PrefixCache, Tiers]:
    """A tree that knows two prompts; host memory has all their pages but the last `missing` of `LONG`."""
    tiers = Tiers(HostTier(1 << 20), CostModel(SIZE), identity=IDENTITY)
    cache = PrefixCache(PagePool(pages + 1), SIZE, IDENTITY.root, host_tier=tiers)
    for text in (LONG, OTHER):
        cache.graft(text)
    gone = cache.find(Prefix(LONG))[len(LONG) // SIZE - missing :]
    for node in cache:
        if node not in gone:
            tiers.put(cache.digest_of(node), payload_of(cache.digest_of(node)))
    return cache, tiers


def on_device(cache: PrefixCache, text: IntArray) -> int:
    return cache.match(cache.keys(Prefix(text)), Prefix(text)).on_device


@pytest.mark.parametrize(("pages", "missing", "expected"), [(40, 0, (4, 3)), (40, 2, (2, 3)), (12, 0, (3, 2))])
def test_pages_come_parents_first_as_far_as_there_is_room(pages: int, missing: int, expected: tuple[int, int]) -> None:
    cache, tiers = grafted(pages, missing=missing)
    filled: list[PageMove] = []

    def fill(moves: Sequence[PageMove]) -> tuple[LostPage, ...]:
        filled.extend(moves)
        return ()

    count = promote(cache, fill, page_bytes=64)
    assert (on_device(cache, LONG), on_device(cache, OTHER)) == expected
    assert count == len(filled) == cache.pool.cached <= pages // restoring.SHARE
    assert not cache.pool.held and not tiers.host.statistics().held
    cache.check_integrity()
    cache.evict(count + promote(cache, fill, page_bytes=64))
    assert on_device(cache, LONG) == 0 and not cache.pool.held
    cache.check_integrity()


def test_a_page_that_can_not_be_filled_stays_away_with_all_below_it() -> None:
    cache, tiers = grafted(40)
    second = cache.digest_of(cache.find(Prefix(LONG))[2])

    def fill(moves: Sequence[PageMove]) -> tuple[LostPage, ...]:
        return tuple(LostPage(move, ValueError()) for move in moves if move.digest == second)

    assert promote(cache, fill, page_bytes=64) == 3
    assert (on_device(cache, LONG), on_device(cache, OTHER)) == (2, 3)
    assert cache.pool.cached == 3 and not cache.pool.held
    assert second not in tiers, "a request would wait for it, and fail"
    cache.check_integrity()


def test_bytes_are_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "MAX_BYTES", 200)
    cache, _ = grafted(40)
    assert promote(cache, lambda moves: (), page_bytes=64) == 3
    monkeypatch.setattr(restoring, "MIN_BYTES", 1000)
    assert promote(cache, lambda moves: (), page_bytes=64) == 0
