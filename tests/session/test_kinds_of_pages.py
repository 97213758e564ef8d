"""Models whose layers keep pages of several shapes, share them, or keep latent ones: every text is the plain loop's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from rekindle._src.models.config import Pages, SharedWith
from rekindle.errors import ConfigError

anyio_test = pytest.mark.anyio
NAMES = ("gemma4-shared-pages-and-embeddings-of-layers", "deepseek-v2")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 192, "page_size": 16,
    "device_pages": 18, "precompile": "lazy", "seed": 0, "quiet": True, "disk_memory": 0,
}  # fmt: skip
PROMPTS = [np.random.default_rng(count).integers(3, 160, count).tolist() for count in (5, 24, 70, 130, 33)]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return checkpoints.case(request.param)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def plain(model: Any, prompt: list[int], count: int = 24) -> list[int]:
    return plain_loop(model, prompt, count, context=192)


@anyio_test
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # arithmetic: the loop has no say in it
async def test_batches_chunks_forks_and_the_cache_have_the_texts_of_the_plain_loop(model: Any, programs: str) -> None:
    async with rekindle.open(model, **OPTIONS, host_memory=1 << 24, cache_dir=programs) as session:
        session._cache_writer.tiers.costs.mode = "always"  # copying, whatever it costs here
        many = await session.generate(PROMPTS, **GREEDY)
        expected = [plain(model, prompt) for prompt in PROMPTS]
        assert [list(done.token_ids) for done in many] == expected
        again = await session.generate(PROMPTS[3], **GREEDY)
        assert again.usage.cached_tokens == 128
        assert list(again.token_ids) == expected[3]
        twice = await session.generate(PROMPTS[1], n=2, **GREEDY)
        assert [list(done.token_ids) for done in twice] == [expected[1]] * 2
        forked = await session.fork(many[1], at=7)
        assert list(forked.token_ids) == expected[1][7:]
        edited = await session.fork(many[1], at=7, edit=[9, 11])
        assert list(edited.token_ids) == plain(model, [*PROMPTS[1], *expected[1][:7], 9, 11], 15)
        handle = session.submit(PROMPTS[2], **{**GREEDY, "max_tokens": 100})
        async for _ in handle:
            break
        handle.cancel()
        session.check_integrity()


@anyio_test
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # arithmetic: the loop has no say in it
async def test_preempted_requests_go_on_with_pages_from_host_memory(model: Any, programs: str) -> None:
    options = {**OPTIONS, "host_memory": 1 << 24}
    async with rekindle.open(model, **options, cache_dir=programs) as session:
        session._cache_writer.tiers.costs.mode = "always"  # copying, whatever it costs here
        many = await session.generate(PROMPTS[:4], **{**GREEDY, "max_tokens": 60})
        assert [list(done.token_ids) for done in many] == [plain(model, prompt, 60) for prompt in PROMPTS[:4]]
        await session.generate(PROMPTS[4], **{**GREEDY, "max_tokens": 150})
        done = await session.generate(PROMPTS[3], **GREEDY)
        assert list(done.token_ids) == plain(model, PROMPTS[3])
        stats = session.stats()
        assert stats.preemptions > 0, "there was room for all of them"
        assert stats.cache.host_hit_pages > 0, "nothing came back from host memory"
        session.check_integrity()


@anyio_test
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # arithmetic: the loop has no say in it
async def test_a_snapshot_of_all_shapes_is_restored(model: Any, programs: str) -> None:
    options = {**OPTIONS, "cache_dir": programs, "disk_memory": 1 << 26}
    async with rekindle.open(model, **options) as session:
        await session.generate(PROMPTS[3], **GREEDY)
        await session.save("kinds")
    async with rekindle.open(model, **options, restore="kinds") as session:
        done = await session.generate(PROMPTS[3], **GREEDY)
        assert done.usage.cached_tokens == 128
        assert list(done.token_ids) == plain(model, PROMPTS[3])


def test_a_page_has_the_bytes_of_the_layers_that_keep_some() -> None:
    config = checkpoints.case(NAMES[0]).config
    small, large = Pages(1, 16, 16), Pages(1, 32, 32)
    assert tuple(cache.pages for cache in config.caches) == (
        small,
        large,
        small,
        SharedWith(2),
        SharedWith(2),
        SharedWith(1),
    )
    options = {**OPTIONS, "cache_dir": None}
    with rekindle.open_sync(checkpoints.case(NAMES[0]), **options) as session:
        numbers = 2 * 16 * (16 + 32 + 16)  # keys and values of 16 tokens
        assert session.config.device_memory == 18 * numbers * 4
    with rekindle.open_sync(checkpoints.case(NAMES[1]), **options) as session:
        assert session.config.device_memory == 18 * 2 * 16 * (24 + 8) * 4, "one vector and one key for each token"


def test_deterministic_is_refused_for_latent_pages() -> None:
    with pytest.raises(ConfigError, match=r"deterministic=True.*(latent pages|experts)"):
        rekindle.open_sync(checkpoints.case(NAMES[1]), **OPTIONS, cache_dir=None, deterministic=True)
