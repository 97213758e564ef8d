"""What the scheduler says that a prompt would hit is what its request then hits, token for token."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from helpers.fakes import DictTier, make_request
from helpers.scheduling import Loop, LoopBuilder
from rekindle._src.core.prompt_hit import PromptHit
from rekindle._src.core.records import Request
from rekindle._src.kvcache.pool import PagePool
from rekindle._src.kvcache.tiers.host import HostTier
from rekindle._src.kvcache.tiers.tiers import CostModel, Tiers
from rekindle._src.kvcache.tree import PrefixCache
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.sequence import Sequence

PAGE = 16


def small(pages: int = 128) -> LoopBuilder:
    return LoopBuilder(page_size=PAGE, max_requests=2, max_tokens_per_step=64, pages=pages)


KINDS = {
    "pages": small(),
    "whole pages alone": small().cache(least_copied=0),
    "few pages": small(pages=24).cache(host_tier=DictTier(1000)),
    "data shards": small().shards(2),
    "states": small().states(slots=8),
    "windows": small().window(positions=24, pages=20),
    "states below the device": small(pages=24).cache(host_tier=DictTier(1000)).states(slots=3, tier=DictTier(1000)),
}


def cached(hit: PromptHit) -> int:
    return hit.device_tokens + hit.host_tokens + hit.disk_tokens


def hit(loop: Loop, request: Request) -> int:
    loop.submit(request)
    loop.run()
    return loop.events[request.id][-1].cached_tokens


@pytest.mark.parametrize("length", [1, 15, 16, 17, 21, 32, 33, 41, 48, 101])
def test_a_prompt_asked_again_hits_all_but_its_last_token(length: int) -> None:
    loop = small().loop()
    prompt = [3 * place % 90 for place in range(length)]
    assert cached(loop.scheduler.forecast(make_request(prompt))) == hit(loop, make_request(prompt, max_tokens=40)) == 0
    told = loop.scheduler.forecast(make_request(prompt))
    assert told.device_tokens == told.reused_tokens == hit(loop, make_request(prompt, max_tokens=1)) == length - 1


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_a_request_hits(kind: str) -> None:
    """Prompts that share beginnings of any length, asked one after the other, in every kind of cache."""
    draw, seen = random.Random(kind), set[int]()
    loop = KINDS[kind].loop()
    stems = [[draw.randrange(90) for _ in range(90)] for _ in range(3)]
    for _ in range(60):
        own = [draw.randrange(90) for _ in range(draw.randrange(1, 30))]
        prompt = draw.choice(stems)[: draw.randrange(90)] + (own if draw.random() < 0.7 else [7])
        before = [cache.statistics() for cache in loop.caches]
        told = loop.scheduler.forecast(make_request(prompt))
        assert [cache.statistics() for cache in loop.caches] == before, "looking changes nothing"
        request = make_request(prompt, max_tokens=draw.randrange(1, 20))
        assert cached(told) == told.reused_tokens == hit(loop, request), prompt
        assert loop.output(request) == loop.model.generate(request)
        seen.add(cached(told) % PAGE)
    assert len(seen) > 1 or kind in ("whole pages alone", "states", "windows", "states below the device")


def test_a_salt_has_hits_of_its_own() -> None:
    loop, prompt = small().loop(), list(range(40))
    hit(loop, make_request(prompt, max_tokens=20, salt="mine"))
    assert cached(loop.scheduler.forecast(make_request(prompt))) == 0
    assert cached(loop.scheduler.forecast(make_request(prompt, salt="mine"))) == 39


@pytest.mark.parametrize("mode", ["always", "never"])
def test_pages_that_are_computed_again_are_cached_and_not_reused(mode: Any) -> None:
    """Half of the page after the two on the device is in a sibling there; all of it is in host memory."""
    pool, costs = PagePool(16), CostModel(PAGE)
    costs.mode = mode
    tiers = Tiers(HostTier(1 << 20), costs)
    cache = PrefixCache(pool, PAGE, b"root", host_tier=tiers)
    ledger, prompt = PageLedger(pool, cache, PAGE), list(range(60))
    for tokens in (prompt, prompt[:40] + [80] * 20):
        pages = pool.take(3)
        prefix = make_request(tokens[:48]).prefix(PAGE)
        published = cache.publish(cache.root, cache.keys(prefix), prefix.tokens, pages)
        assert published is not None
        pool.release([*published.pages, *published.duplicates])
        cache.unreference(published.node)
        if tokens is prompt:
            (move,) = cache.evict(1)
            tiers.put(move.digest, (np.zeros(4),))
            cache.offload_done([move])
    told = ledger.forecast(Sequence(make_request(prompt), 0, 1, None, PAGE))  # type: ignore[arg-type]
    assert (cached(told), told.disk_tokens, costs.refused) == (48, 0, 0)
    assert told.reused_tokens == {"always": 48, "never": 40}[mode]
    assert (told.device_tokens, told.host_tokens) == {"always": (32, 16), "never": (40, 8)}[mode]
