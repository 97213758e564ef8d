"""The prefix tree: exact matches, publication, merging, eviction order, tiers, pins; and that size costs nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest

from helpers.fakes import DictTier
from helpers.scheduling import prefix_of
from rekindle._src.core.prefix import PageNamespace, Prefix
from rekindle._src.core.records import IntArray, PageMove
from rekindle._src.kvcache import Node, PagePool, PrefixCache, page_digest, root_digest

SIZE = 4


def tokens(*values: int) -> IntArray:
    """Pages of one repeated token each."""
    return np.repeat(np.array(values, np.int32), SIZE)


class Tree:
    """A cache over a small pool, and a caller that holds its pages properly."""

    def __init__(self, pages: int = 16, tier: DictTier | None = None) -> None:
        self.pool = PagePool(pages + 1)
        self.tier = tier
        ticks = itertools.count(1)
        self.cache = PrefixCache(self.pool, SIZE, root_digest("m"), host_tier=tier, clock=lambda: float(next(ticks)))

    def insert(self, text: IntArray) -> list[int]:
        """Admit, compute, publish and finish a prompt; returns its pages."""
        keys = self.cache.keys(Prefix(text))
        match = self.cache.match(keys, Prefix(text))
        pages = self.cache.lock(match)
        taken = self.pool.take(len(keys) - match.on_device)
        self.cache.restore(match, taken[: len(match.nodes) - match.on_device])
        pages += taken
        start, parent = len(match.nodes), match.nodes[-1] if match.nodes else self.cache.root
        done = self.cache.publish(parent, keys[start:], text[start * SIZE : len(keys) * SIZE], pages[start:])
        assert done is not None
        self.pool.release(done.duplicates)
        final = pages[:start] + done.pages
        self.pool.release(final)
        self.cache.unreference(done.node)
        self.check()
        return final

    def found(self, text: IntArray) -> int:
        return len(self.cache.match(self.cache.keys(Prefix(text)), Prefix(text)).nodes)

    def check(self) -> None:
        self.cache.check_integrity()

    def land(self, moves: Sequence[PageMove]) -> None:
        """What the runner does: payloads reach the tier."""
        assert self.tier is not None
        for move in moves:
            self.tier.put(move.digest, (np.zeros(1),))
        self.cache.offload_done(moves)


def test_the_longest_prefix_of_whole_pages_is_found() -> None:
    tree = Tree()
    pages = tree.insert(tokens(1, 2, 3))
    keys = tree.cache.keys(Prefix(tokens(1, 2, 9)))
    match = tree.cache.match(keys, Prefix(tokens(1, 2, 9)))
    assert match.pages == pages[:2] and match.on_device == 2
    assert tree.found(tokens(1, 2, 3, 4)) == 3
    assert tree.found(tokens(2, 1)) == 0
    assert tree.found(tokens(1, 2)[:-1]) == 1


def test_a_partial_page_is_not_in_the_tree_until_it_is_full() -> None:
    tree = Tree()
    tree.insert(tokens(1, 2)[:-1])
    assert len(tree.cache) == 1
    tree.insert(tokens(1, 2))
    assert len(tree.cache) == 2


def test_branches_share_their_stem() -> None:
    tree = Tree()
    first = tree.insert(tokens(1, 2, 3))
    second = tree.insert(tokens(1, 2, 4))
    assert first[:2] == second[:2] and first[2] != second[2]
    assert len(tree.cache) == 4 == tree.pool.cached


def test_a_key_collision_costs_a_hit_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree()
    tree.insert(tokens(1, 2))
    monkeypatch.setattr(tree.cache, "keys", lambda prefix: list(range(len(prefix.tokens) // SIZE)))
    tree.insert(tokens(5, 6))
    assert tree.found(tokens(5, 6)) == 2
    assert tree.found(tokens(5, 7)) == 1  # the key of 6 and 7 is the same, their tokens are not
    assert tree.found(tokens(7, 6)) == 0
    pages = tree.pool.take(2)
    assert tree.cache.publish(tree.cache.root, [0, 1], tokens(7, 8), pages) is None
    tree.pool.release(pages)
    tree.check()


def test_a_page_computed_twice_is_kept_once() -> None:
    tree = Tree()
    kept = tree.insert(tokens(1, 2))
    mine = tree.pool.take(3)
    text = tokens(1, 2, 3)
    done = tree.cache.publish(tree.cache.root, tree.cache.keys(Prefix(text)), text, mine)
    assert done is not None
    assert done.pages == [*kept, mine[2]] and done.duplicates == mine[:2]
    assert tree.pool.held == 5, "the duplicates are still the caller's, until no step reads them"
    tree.pool.release(done.duplicates)
    assert tree.pool.held == 3
    tree.pool.release(done.pages)
    tree.cache.unreference(done.node)
    assert (tree.pool.held, tree.pool.cached) == (0, 3)
    tree.check()


def test_least_recently_used_leaves_go_first() -> None:
    tree = Tree()
    tree.insert(tokens(1, 2))
    tree.insert(tokens(3))
    tree.insert(tokens(4, 5))
    tree.insert(tokens(1))  # page 2 stays as old as it was
    order = []
    for _ in range(5):
        tree.cache.evict(1)
        order.append([tree.found(tokens(*text)) for text in ((1, 2), (3,), (4, 5))])
        tree.check()
    assert order == [[1, 1, 2], [1, 0, 2], [1, 0, 1], [1, 0, 0], [0, 0, 0]]


def test_of_equally_recent_leaves_the_least_visited_goes_first() -> None:
    tree = Tree()
    tree.insert(tokens(1))
    tree.insert(tokens(1))
    tree.cache.clock = lambda: 100.0
    tree.insert(tokens(1))
    tree.insert(tokens(2))
    tree.cache.evict(1)
    assert tree.found(tokens(1)) == 1 and tree.found(tokens(2)) == 0


def test_held_pages_and_their_ancestors_stay() -> None:
    tree = Tree()
    tree.insert(tokens(1, 2, 3))
    match = tree.cache.match(tree.cache.keys(Prefix(tokens(1, 2))), Prefix(tokens(1, 2)))
    pages = tree.cache.lock(match)
    assert tree.pool.cached == 1
    tree.cache.evict(10)
    assert tree.found(tokens(1, 2, 3)) == 2
    tree.pool.release(pages)
    tree.cache.unreference(match.nodes[-1])
    tree.cache.evict(10)
    assert len(tree.cache) == 0 and tree.pool.free == tree.pool.total
    tree.check()


def test_a_page_was_used_until_it_was_let_go() -> None:
    tree = Tree()
    tree.insert(tokens(1))
    match = tree.cache.match(tree.cache.keys(Prefix(tokens(1))), Prefix(tokens(1)))
    pages = tree.cache.lock(match)
    tree.insert(tokens(2))
    tree.pool.release(pages)
    tree.cache.unreference(match.nodes[-1])
    tree.cache.evict(1)
    assert tree.found(tokens(1)) == 1 and tree.found(tokens(2)) == 0


def test_without_a_tier_an_evicted_page_is_forgotten() -> None:
    tree = Tree()
    tree.insert(tokens(1, 2))
    assert tree.cache.evict(1) == []
    assert len(tree.cache) == 1 and tree.cache.statistics().forgotten_nodes == 1


def test_an_evicted_page_goes_to_the_host_and_comes_back() -> None:
    tree = Tree(tier=DictTier())
    pages = tree.insert(tokens(1, 2))
    moves = tree.cache.evict(2)
    expected = page_digest(page_digest(root_digest("m"), tokens(1)), tokens(2))
    assert [move.page for move in moves] == pages[::-1] and moves[0].digest == expected
    assert tree.found(tokens(1, 2)) == 0, "its payload is on its way"
    tree.land(moves)
    match = tree.cache.match(tree.cache.keys(Prefix(tokens(1, 2))), Prefix(tokens(1, 2)))
    assert len(match.nodes) == 2 and match.on_device == 0
    fresh = tree.pool.take(2)
    assert [move.page for move in tree.cache.restore(match, fresh)] == fresh
    tree.pool.release(fresh)
    tree.cache.unreference(match.nodes[-1])
    tree.check()
    assert tree.cache.evict(2) == [], "the host still has both"


def test_pages_that_the_host_pruned_are_forgotten_by_the_next_match() -> None:
    tier = DictTier()
    tree = Tree(tier=tier)
    tree.insert(tokens(1, 2))
    tree.land(tree.cache.evict(2))
    tier.payloads.clear()
    assert tree.found(tokens(1, 2)) == 0
    tree.cache.match(tree.cache.keys(Prefix(tokens(1))), Prefix(tokens(1)))
    assert len(tree.cache) == 2, "the first page has a child that was not asked about yet"
    assert tree.insert(tokens(1, 2)) and tree.pool.cached == 2


def test_pruned_nodes_do_not_pile_up() -> None:
    tree = Tree(pages=8, tier=DictTier(limit=4))
    for value in range(0, 2000, 2):
        if tree.pool.free < 2:
            tree.land(tree.cache.evict(2))
        tree.insert(tokens(value, value + 1))
    assert len(tree.cache) < 40


def test_a_failed_restore_takes_everything_below_off_the_device() -> None:
    tree = Tree(tier=DictTier())
    tree.insert(tokens(1, 2))
    tree.land(tree.cache.evict(2))
    match = tree.cache.match(tree.cache.keys(Prefix(tokens(1, 2))), Prefix(tokens(1, 2)))
    fresh = tree.pool.take(2)
    moves = tree.cache.restore(match, fresh)
    tree.cache.detach(moves[:1])
    assert not any(node.page for node in tree.cache)
    tree.pool.release(fresh)
    assert tree.pool.free == tree.pool.total
    tree.check()


def test_pinned_prefixes_stay_until_unpinned_as_often_as_pinned() -> None:
    tree = Tree()
    tree.insert(tokens(1, 2, 3))
    tree.insert(tokens(7))
    text = tokens(1, 2, 2)
    assert tree.cache.pin(Prefix(text)) == tree.cache.pin(Prefix(text)) == 2 * SIZE
    tree.cache.evict(10)
    assert tree.found(tokens(1, 2, 3)) == 2 and tree.found(tokens(7)) == 0
    tree.cache.unpin(Prefix(text))
    tree.cache.evict(10)
    assert tree.found(text) == 2 == tree.cache.pinned_pages
    assert tree.cache.unpin(Prefix(text)) == 2 * SIZE
    tree.cache.evict(10)
    assert len(tree.cache) == 0 == tree.cache.pinned_pages
    tree.check()


def test_a_reset_forgets_pages_that_are_held_too() -> None:
    tree = Tree()
    tree.insert(tokens(1, 2))
    tree.cache.pin(Prefix(tokens(1)))
    match = tree.cache.match(tree.cache.keys(Prefix(tokens(1, 2))), Prefix(tokens(1, 2)))
    pages = tree.cache.lock(match)
    tree.cache.reset(root_digest("other weights"))
    assert tree.found(tokens(1, 2)) == 0 and tree.pool.held == 2
    tree.pool.release(pages)
    assert tree.pool.free == tree.pool.total
    tree.check()


def test_a_snapshot_can_be_written_and_grafted() -> None:
    tree, tier = Tree(), DictTier()
    tree.insert(tokens(1, 2, 3))
    tree.insert(tokens(1, 4))
    other = Tree(tier=tier)
    seen: set[Node] = {tree.cache.root}
    for node in tree.cache:
        assert node.parent in seen, "parents come first"
        seen.add(node)
        tier.put(tree.cache.digest_of(node), (np.zeros(1),))
        grafted = other.cache.graft(prefix_of(tree.cache, node))
        assert grafted is not None and other.cache.digest_of(grafted[-1]) == tree.cache.digest_of(node)
    other.check()
    assert len(other.cache) == 4 and other.found(tokens(1, 2, 3)) == 3 and other.found(tokens(1, 4)) == 2
    assert other.insert(tokens(1, 2, 3)) and other.cache.statistics().host_hit_pages == 3


def test_restored_tokens_are_those_of_the_page() -> None:
    tree = Tree()
    tree.insert(tokens(1, 2, 3))
    last = list(tree.cache)[-1]
    assert tree.cache.tokens_of(last).tolist() == tokens(3).tolist()
    assert prefix_of(tree.cache, last).tolist() == tokens(1, 2, 3).tolist()
    assert last.depth == 3


@pytest.mark.clock
def test_matching_and_inserting_cost_nothing_with_the_size_of_the_tree() -> None:
    """A 32,768-token prompt against 100,000 pages takes no longer than against few: 2 ms when it is quiet."""
    size, rng = 16, np.random.default_rng(0)
    pool = PagePool(110_000)
    cache = PrefixCache(pool, size, root_digest("big"))

    def insert() -> tuple[IntArray, float]:
        text = rng.integers(0, 50_000, 2048 * size).astype(np.int32)
        pages = pool.take(2048)
        start = time.thread_time()
        done = cache.publish(cache.root, cache.keys(Prefix(text)), text, pages)
        spent = time.thread_time() - start
        assert done is not None
        pool.release(pages)
        cache.unreference(done.node)
        return text, spent

    def match(text: IntArray) -> float:
        start = time.thread_time()
        assert cache.match(cache.keys(Prefix(text)), Prefix(text)).on_device == 2048
        return time.thread_time() - start

    text, _ = insert()
    small = min(match(text) for _ in range(5))
    inserts = [insert()[1] for _ in range(48)]
    assert len(cache) > 100_000
    large = min(match(text) for _ in range(5))
    # A walk over the tree would take fifty times as long; other work on the machine takes its caches, twice.
    assert large < 5 * small + 0.0005
    assert min(inserts[-8:]) < 5 * min(inserts[:8]) + 0.0005


def test_pages_of_earlier_sessions_are_learned_as_prompts_come() -> None:
    """They are found by their digests, in the namespace of the prompt, up to the first that is missing."""
    tier, text, other = DictTier(), tokens(0, 1, 2, 3)[:-2], tokens(0, 1, 9)
    before = Tree(tier=tier)
    salted = PageNamespace("mine")
    for prefix in (Prefix(text), Prefix(other), Prefix(text, salted)):
        node, whole = before.cache.root_of(prefix.namespace), len(prefix.tokens) // SIZE * SIZE
        pages = before.pool.take(whole // SIZE)
        published = before.cache.publish(node, before.cache.keys(prefix), prefix.tokens[:whole], pages)
        assert published is not None
        for name in before.cache.names_to(published.node):
            tier.put(name, (np.zeros(1),))
    cache = Tree(tier=tier).cache
    for _ in range(2):
        cache.learn(cache.keys(Prefix(text)), Prefix(text))
        assert [len(cache.find(prefix)) for prefix in (Prefix(text), Prefix(other))] == [3, 2]
        assert len(cache) == 3 and not cache.find(Prefix(text, salted))
    cache.learn(cache.keys(Prefix(other)), Prefix(other))
    assert len(cache.find(Prefix(other))) == 3 and len(cache) == 4
    cache.learn(cache.keys(Prefix(text, salted)), Prefix(text, salted))
    assert [node.depth for node in cache.find(Prefix(text, salted))] == [1, 2, 3] and len(cache) == 7
    assert {cache.digest_of(node) for node in cache} == set(tier.payloads)
    unknown = Prefix(tokens(0, 8))
    cache.learn(cache.keys(unknown), unknown)
    assert len(cache.find(unknown)) == 1 and len(cache) == 7
    tier.discard(cache.digest_of(cache.find(Prefix(text))[1]))
    fresh = Tree(tier=tier).cache
    fresh.learn(fresh.keys(Prefix(text)), Prefix(text))
    assert len(fresh.find(Prefix(text))) == 1, "what follows a missing page is of no use"
    cache.check_integrity()
    fresh.check_integrity()
