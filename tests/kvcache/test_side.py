"""Side caches: their declarations are values, and a prompt continues only where all of a tree's caches let it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import checkpoints
from helpers.fakes import DictTier
from rekindle import EngineConfig
from rekindle._src.core.prefix import Prefix
from rekindle._src.kvcache import PagePool, PrefixCache, SideCache, page_digest, root_digest
from rekindle._src.kvcache.persist import prefix_file
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import LeafSpec, Page
from rekindle._src.models.base import ALONE
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.side_caches import KINDS, RecurrentStates, WindowPages, side_caches
from rekindle.errors import StoreError

SIZE = 4
CONFIG = EngineConfig(
    dtype="float32", kv_dtype="float32", max_requests=2, max_tokens_per_step=64, max_model_len=256, page_size=16,
    device_pages=64, host_memory=1 << 20,
)  # fmt: skip


def states(step: int = 2, slots: int = 9) -> RecurrentStates:
    return RecurrentStates(page_size=SIZE, slots=slots, first=1, step=step * SIZE)


def windows(span: int = 2) -> WindowPages:
    return WindowPages(page_size=SIZE, slots=33, first=1, step=SIZE, span=span, window=span * SIZE)


def tree(*plans: Any) -> tuple[PrefixCache, list[SideCache]]:
    """A tree of eight pages on the device, whose side caches are empty."""
    pool = PagePool(20)
    sides = [plan.cache(DictTier(9), number=number) for number, plan in enumerate(plans)]
    cache = PrefixCache(pool, SIZE, root_digest("test"), sides=sides)
    tokens = np.arange(8 * SIZE, dtype=np.int32)
    cache.publish(cache.root, cache.keys(Prefix(tokens)), tokens, pool.take(8))
    return cache, sides


def give(cache: PrefixCache, side: SideCache, *depths: int) -> None:
    """Attach an entry to the nodes at these depths."""
    nodes = {node.depth: node for node in cache}
    for depth in depths:
        slot = side.take()
        side.attach(nodes[depth], slot)
        side.release(slot)


def depth(cache: PrefixCache) -> int:
    tokens = np.arange(8 * SIZE, dtype=np.int32)
    match = cache.match(cache.keys(Prefix(tokens)), Prefix(tokens))
    assert cache.probe(cache.keys(Prefix(tokens))) == len(match.nodes) == len(cache.continuable(list(match.nodes)))
    assert match.reached == 8
    return len(match.nodes)


def test_a_prompt_continues_where_both_side_caches_let_it() -> None:
    cache, (one, other) = tree(states(), windows())
    give(cache, one, 2, 6)
    assert depth(cache) == 0
    give(cache, other, 4, 5, 6)
    assert depth(cache) == 6, "a state at 6, and the window of 5 and 6"
    cache, (one, other) = tree(states(), windows())
    give(cache, one, 2, 6)
    give(cache, other, 1, 2, 5, 7, 8)
    assert depth(cache) == 2, "of 8 and 7 there is a window and no state, of 6 a state and no window"
    cache.check_integrity()


def test_moves_say_whose_they_are_and_a_page_takes_all_entries_with_it() -> None:
    cache, (one, other) = tree(states(), windows())
    give(cache, one, 8)
    give(cache, other, 7, 8)
    assert {one.number, other.number} == {0, 1}
    assert cache.statistics().states == 3
    cache.pool.release([node.page for node in cache])
    cache.unreference(next(node for node in cache if node.depth == 8))
    cache.evict(1)
    assert not len(one) and [node.depth for node in other] == [7]
    cache.check_integrity()
    for side in (one, other):
        side.check_integrity()
        assert [move.side for move in side.moves()[0]] == [side.number]


def test_a_plan_is_a_value_and_says_what_was_said_in_files_of_earlier_versions() -> None:
    """Segments and snapshots of states and windows were stored under these layouts since 0.1."""
    pages = Identity("weights", "float32", 16, "cpu 2 layers [((4,), 'float32')] of [[0, 1]]")
    assert not pages.beside_pages
    layouts = {}
    for name in ("qwen3.5", "gemma3"):
        model = config_from_hf(checkpoints.CASES[name])
        (plan,) = side_caches(model, CONFIG, ALONE)
        assert (plan,) == side_caches(model, CONFIG, ALONE) and hash(plan) == hash(plan)
        assert plan != dataclasses.replace(plan, slots=plan.slots + 1)
        assert plan.host_bytes == CONFIG.host_memory // 4
        layouts[plan.name] = plan.identity(pages)
        assert layouts[plan.name].beside_pages and layouts[plan.name].leaves == plan.leaves
        assert plan.entry_bytes == sum(leaf.nbytes for leaf in plan.leaves) > 0
    assert {kind.name for kind in KINDS} == layouts.keys()
    numbers = layouts["states"].leaves[0].shape[0]
    assert layouts["states"].layout == f"{pages.layout}, states of {numbers} numbers"
    assert layouts["windows"].layout.startswith(f"{pages.layout}, windows of ")
    assert layouts["windows"].layout.endswith(" tokens")


@pytest.mark.parametrize("present", [(0, 1), (0,), (1,), ()])
def test_a_prefix_file_has_the_entries_of_each_side_cache(present: tuple[int, ...], tmp_path: Path) -> None:
    path, pages = (
        tmp_path / "prefix",
        Identity("weights", "float32", SIZE, "pages", leaves=(LeafSpec((3,), "float32"),)),
    )
    parent, content = pages.root, []
    for index in range(2):
        tokens = np.arange(SIZE, dtype=np.int32) + index
        digest = page_digest(parent, tokens)
        content.append((Page(digest, parent, tokens, 1, 0.0), (np.full((1, 3), index, np.float32),)))
        parent = digest
    entry = (LeafSpec((5,), "float32"),)
    sides = [dataclasses.replace(plan, leaves=entry).identity(pages) for plan in (states(), windows())]
    written = [[(content[1][0], (np.full((1, 5), at, np.float32),))] if at in present else [] for at in (0, 1)]
    prefix_file.write(path, pages, content, sides=list(zip(sides, written, strict=True)))
    read, found = prefix_file.read(path, pages, sides=sides)
    assert [page.digest for page, _ in read] == [page.digest for page, _ in content]
    values = [[float(payload[0][0, 0]) for _, payload in own] for own in found]
    assert values == [[float(at)] if at in present else [] for at in (0, 1)]
    if present:
        with pytest.raises(StoreError, match=r"has \d+ bytes and should have"):
            prefix_file.read(path, pages)
