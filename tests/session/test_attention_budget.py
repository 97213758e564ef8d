"""`attention_budget`: what a token being decoded attends to depends on nothing but the text before it."""

from __future__ import annotations

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
STORY = "Once upon a time there was a small dog. Every day he went to the park with Anna, and they played. " * 2
PROMPTS = [f"{begin} {STORY}" for begin in ("They played.", "One day he saw a", "Tom said: No.", "The sun was big.")]
ANSWER: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
SMALL = TINY | {"page_size": 8, "attention_budget": 24}


async def texts(session: Session, prompts: list[str]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in await session.generate(prompts, **ANSWER)]


def text_of(prompt: str = PROMPTS[0], **options: Any) -> tuple[int, ...]:
    with rekindle.open_sync("tiny", **options) as session:
        return session.generate_sync(prompt, **ANSWER).token_ids


@pytest.mark.anyio
async def test_tokens_are_the_same_alone_together_cached_offloaded_and_with_drafts() -> None:
    async with rekindle.open("tiny", **SMALL) as session:
        cold = []
        for prompt in PROMPTS:
            await session.cache.clear(tier="memory")
            cold += await texts(session, [prompt])
        await session.cache.clear(tier="memory")
        assert await texts(session, PROMPTS) == cold
        again = await session.generate(PROMPTS, **ANSWER)
        assert [done.token_ids for done in again] == cold and all(done.usage.cached_tokens for done in again)
        wait_until_idle(session)
        session.check_integrity()
    async with rekindle.open("tiny", **SMALL | {"attention_budget": None}) as session:
        assert await texts(session, PROMPTS) != cold, "all keys were within the budget: the test shows nothing"
    async with rekindle.open("tiny", **SMALL | {"device_pages": 30, "host_memory": "16MiB"}) as session:
        for _ in range(2):
            for prompt, want in zip(PROMPTS, cold, strict=True):
                assert await texts(session, [prompt]) == [want]
        assert session.cache.stats().offloaded_pages, "no page left the device"
    async with rekindle.open("tiny", **SMALL, prompt_lookup=3) as session:
        assert await texts(session, PROMPTS) == cold


def test_every_implementation_chooses_the_same_pages() -> None:
    want = text_of(**SMALL, kernels="reference")
    assert text_of(**SMALL) == want and text_of(**SMALL, kernels="xla") == want


@pytest.mark.parametrize("kv_dtype", by_default(["int8", "bfloat16", "int8-int4", "int4"], 1))
def test_narrow_pages_choose_too(kv_dtype: str) -> None:
    options = SMALL | {"kv_dtype": kv_dtype, "page_size": 16, "attention_budget": 48}
    want = text_of(**options)
    assert text_of(**options, kernels="xla") == want


def test_a_budget_that_all_keys_fit_in_changes_no_token() -> None:
    want = text_of(**SMALL | {"attention_budget": None})
    assert text_of(**SMALL | {"attention_budget": 1 << 20}) == want
    assert text_of(**SMALL | {"attention_budget": 136}) == want, "of 17 pages, and there are fewer"


def test_the_next_turn_of_a_chat_attends_to_all_keys_of_the_reply() -> None:
    """A reply's tokens attended to some keys, and those of a prompt attend to all: their pages are not shared."""
    with rekindle.open_sync("tiny", **SMALL) as session:
        first = session.generate_sync(PROMPTS[0], **ANSWER)
        ids = [*session.tokenizer.encode(PROMPTS[0]), *first.token_ids]
        second = session.generate_sync(ids, **ANSWER)
        assert 0 < second.usage.cached_tokens <= len(ids) - len(first.token_ids)
        session.cache.clear(tier="memory").result_sync()
        assert session.generate_sync(ids, **ANSWER).token_ids == second.token_ids


def test_a_restart_brings_bounds_back_with_their_pages(tmp_path: Path) -> None:
    options = SMALL | {"cache_dir": tmp_path, "disk_memory": "64MiB"}
    with rekindle.open_sync("tiny", **options) as session:
        cold = session.generate_sync(PROMPTS[0], **ANSWER).token_ids
        session.save("story").result_sync()
    with rekindle.open_sync("tiny", **options, restore="story") as session:
        again = session.generate_sync(PROMPTS[0], **ANSWER)
        assert again.usage.cached_tokens and again.token_ids == cold
    for other in ({"attention_budget": 32}, {"attention_budget": None}):
        with pytest.raises(SnapshotRefused, match="laid out"):
            rekindle.open_sync("tiny", **options | other, restore="story")


@pytest.mark.parametrize(
    "options", by_default([{}, {"prompt_lookup": 3}, {"kv_dtype": "int8"}, {"prefix_cache": False}], 2)
)
def test_preempted_requests_decode_their_answers_again(options: dict[str, Any]) -> None:
    """In a prompt these tokens would attend to all keys, and later ones would differ."""
    short = [STORY[:80] + end for end in ("they played", "one day he saw a", "Tom said: No", "the sun was")]
    answer = ANSWER | {"max_tokens": 60, "presence_penalty": 0.3, "logprobs": 2}
    options = SMALL | {"page_size": 16, "attention_budget": 32} | options
    with rekindle.open_sync("tiny", **options) as session:
        alone = [session.generate_sync(prompt, **answer) for prompt in short]
        assert not session.stats().preemptions
    with rekindle.open_sync("tiny", **options, device_pages=14) as session:
        done = session.generate_sync(short, **answer)
        assert session.stats().preemptions, "there was room for all of them"
        assert [one.token_ids for one in done] == [one.token_ids for one in alone]
        for one, other in zip(done, alone, strict=True):
            assert one.logprobs is not None and other.logprobs is not None and len(one.logprobs) == 60
            numbers, others = ([token.logprob for token in each.logprobs or ()] for each in (one, other))
            assert numbers == pytest.approx(others, abs=1e-4)
        wait_until_idle(session)
        session.check_integrity()


@pytest.mark.anyio
async def test_a_stream_goes_on_after_a_sleep_as_if_there_had_been_none() -> None:
    answer = ANSWER | {"max_tokens": 200}
    async with rekindle.open("tiny", **SMALL) as session:
        want = (await session.generate(PROMPTS[0], **answer)).token_ids
    async with rekindle.open("tiny", **SMALL) as session:
        stream = session.stream(PROMPTS[0], **answer)
        async for _ in stream:
            if not session.stats().preemptions:
                await session.sleep()
                await session.wake()
        assert session.stats().preemptions == 1, "it had ended before"
        assert (await stream).token_ids == want


@pytest.mark.parametrize("family", by_default(["gemma3_text", "gpt_oss", "qwen3_5_text"], 1))
def test_models_with_states_windows_and_sinks_have_a_budget_where_they_see_all_keys(family: str) -> None:
    raw = OF_FAMILY[family][0]
    options = SMALL | {"max_model_len": 128}
    prompt = [7 + index % 90 for index in range(90)]
    loaded = model(raw, tensors(raw))
    found = []
    for kernels in ("reference", None):
        with rekindle.open_sync(loaded, **options, kernels=kernels) as session:
            found.append(session.generate_sync(prompt, **ANSWER).token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"attention_budget": 8}, r"below 2 pages of 8 tokens.*Use at least 16"),
        ({"attention_budget": 24, "deterministic": True}, "can't be kept"),
        ({"attention_budget": 24, "kernels": "xla_gpu"}, r"attention_budget.*24.*'xla_gpu'.*Leave one of the two out"),
    ],
)
def test_what_can_not_be_kept_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rekindle.open_sync("tiny", **TINY | {"page_size": 8} | options)


def test_families_without_pages_to_choose_are_refused() -> None:
    raw = OF_FAMILY["deepseek_v2"][0]
    with pytest.raises(ConfigError, match=r"attention_budget.*latent pages.*Leave it out"):
        rekindle.open_sync(model(raw, tensors(raw)), **TINY, attention_budget=64)
