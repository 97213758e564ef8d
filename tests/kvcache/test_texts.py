"""The texts of a tree: each once, the latest last, with what it shares with a later one left out."""

from __future__ import annotations

import numpy as np

from rekindle._src.core.prefix import PageNamespace, Prefix
from rekindle._src.kvcache import PagePool, PrefixCache, root_digest
from rekindle._src.kvcache.texts import known_texts

SIZE = 4


def tree(*texts: tuple[list[int], str | None]) -> PrefixCache:
    ticks = iter(range(1, 1000))
    cache = PrefixCache(PagePool(100), SIZE, root_digest("texts"), clock=lambda: float(next(ticks)))
    for tokens, salt in texts:
        known = cache.find(Prefix(np.array(tokens, np.int32), PageNamespace(salt)))
        after = known[-1] if known else cache.root_of(PageNamespace(salt))
        nodes = cache.graft(np.array(tokens[len(known) * SIZE :], np.int32), after=after)
        for node in nodes or ():
            node.last_use = float(next(ticks))
    return cache


def found(cache: PrefixCache, most: int = 1000) -> list[list[int]]:
    return [text.tolist() for text in known_texts(cache, most)]


SHARED = list(range(100, 112))
FIRST, SECOND, OTHER = [*SHARED, 1, 2, 3, 4, 5, 6, 7, 8], [*SHARED, 9, 9, 9, 9], [50, 51, 52, 53]


def test_what_texts_share_is_there_once() -> None:
    cache = tree((FIRST, None), (SECOND, None), (OTHER, None))
    assert found(cache) == [FIRST[8:], SECOND, OTHER]


def test_the_texts_that_were_used_last_come_first_where_there_is_little_room() -> None:
    cache = tree((FIRST, None), (SECOND, None), (OTHER, None))
    assert found(cache, len(OTHER) + len(SECOND)) == [SECOND, OTHER]
    assert found(cache, 3) == []


def test_texts_of_a_salt_are_nobody_elses() -> None:
    cache = tree((FIRST, "a tenant"), (OTHER, None))
    assert found(cache) == [OTHER]
