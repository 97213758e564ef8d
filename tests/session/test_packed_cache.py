"""Caches of eight-bit keys with four-bit values: a text does not depend on the batch, the cache or a preemption."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers.checkpoints import OF_FAMILY, model, tensors
from helpers.sessions import wait_until_idle
from helpers.small import TINY
from helpers.thorough import by_default
from rekindle import Session
from rekindle.errors import ConfigError, SnapshotRefused

pytestmark = pytest.mark.usefixtures("shared_programs")
STORY = "Once upon a time there was a small dog. Every day he went to the park with Anna, and "
PROMPTS = [STORY + end for end in ("they played", "one day he saw a", "Tom said: No", "the sun was")]
ANSWER: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}


async def texts(session: Session, prompts: list[str]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in await session.generate(prompts, **ANSWER)]


@pytest.mark.anyio
@pytest.mark.parametrize("kv_dtype", by_default(["int8-int4", "int4"]))
async def test_tokens_are_the_same_alone_together_cached_offloaded_and_preempted(kv_dtype: str) -> None:
    options = TINY | {"kv_dtype": kv_dtype, "page_size": 16}
    async with rekindle.open("tiny", **options) as session:
        cold = []
        for prompt in PROMPTS:
            await session.cache.clear(tier="memory")
            cold += await texts(session, [prompt])
        await session.cache.clear(tier="memory")
        assert await texts(session, PROMPTS) == cold
        again = await session.generate(PROMPTS, **ANSWER)
        assert [done.token_ids for done in again] == cold and all(done.usage.cached_tokens for done in again)
        full = session.cache.stats().page_bytes
        wait_until_idle(session)
    # Room for about two of four requests, and for their pages in memory of the host.
    async with rekindle.open("tiny", **options | {"device_pages": 10, "host_memory": 64 * full}) as session:
        assert await texts(session, PROMPTS) == cold
        assert session.stats().preemptions, "there was room for all of them"
        assert await texts(session, PROMPTS[::-1]) == cold[::-1]
        wait_until_idle(session)
        session.check_integrity()


FAMILIES = ["qwen3_5_text", "gemma3_text", "falcon_h1", "lfm2"]


@pytest.mark.parametrize("kv_dtype", by_default(["int8-int4", "int4"], 1))
@pytest.mark.parametrize("family", by_default(FAMILIES, 2))
def test_models_with_states_and_windows_have_packed_pages(family: str, kv_dtype: str) -> None:
    raw = OF_FAMILY[family][0]
    loaded, answer = model(raw, tensors(raw)), ANSWER | {"max_tokens": 30}
    prompts = [[7 + (start + index) * index % 90 for index in range(90)] for start in range(4)]
    options = TINY | {"kv_dtype": kv_dtype, "page_size": 16, "max_model_len": 128}
    with rekindle.open_sync(loaded, **options) as session:
        cold = [session.generate_sync(prompt, **answer).token_ids for prompt in prompts]
        again = session.generate_sync(prompts, **answer)
        assert [one.token_ids for one in again] == cold
        assert any(one.usage.cached_tokens for one in again), "no answer found pages"
    with rekindle.open_sync(loaded, **options, device_pages=16) as session:
        assert [one.token_ids for one in session.generate_sync(prompts, **answer)] == cold
        assert session.stats().preemptions, "there was room for all of them"
        wait_until_idle(session)
        session.check_integrity()


def test_a_snapshot_belongs_to_its_format(tmp_path: Path) -> None:
    options = TINY | {"cache_dir": tmp_path, "disk_memory": "64MiB", "page_size": 8}
    with rekindle.open_sync("tiny", **options, kv_dtype="int8-int4") as session:
        cold = session.generate_sync(PROMPTS[0], **ANSWER).token_ids
        session.save("story").result_sync()
    with rekindle.open_sync("tiny", **options, kv_dtype="int8-int4", restore="story") as session:
        again = session.generate_sync(PROMPTS[0], **ANSWER)
        assert again.usage.cached_tokens and again.token_ids == cold
    for other in ("int8", "int4"):
        with pytest.raises(SnapshotRefused, match="pages hold 'int8-int4'"):
            rekindle.open_sync("tiny", **options, kv_dtype=other, restore="story")


def test_keys_of_four_bits_are_warned_of_in_small_models(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rekindle.engine"), rekindle.open_sync("tiny", **TINY, kv_dtype="int8-int4"):
        pass
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "rekindle.engine"), rekindle.open_sync("tiny", **TINY, kv_dtype="int4"):
        pass
    assert "kv_dtype='int8-int4' keeps keys in eight" in caplog.text


def test_values_that_are_a_part_of_the_keys_have_one_width() -> None:
    raw = OF_FAMILY["deepseek_v2"][0]
    latent = model(raw, tensors(raw))
    for kv_dtype in ("int8-int4", "int4"):
        with pytest.raises(ConfigError, match=r"values are a part of the keys\. Use kv_dtype='int8'"):
            rekindle.open_sync(latent, kv_dtype=kv_dtype)
