"""Requests that part within a page: the second one copies the page of the first one, and gives what it gives alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest

from helpers.sessions import wait_until_idle
from helpers.small import opening, plain, prompt
from helpers.thorough import by_default, one_event_loop  # noqa: F401  the fixture
from rekindle import Session

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
anyio_test = pytest.mark.anyio
T = TypeVar("T")
OPTIONS: dict[str, Any] = {"page_size": 16, "precompile": "lazy"}


async def together(session: Session, call: Callable[[], Awaitable[T]], requests: int) -> T:
    """Await a call whose requests have all arrived before the first step."""
    results: list[T] = []

    async def run() -> None:
        results.append(await call())

    async with anyio.create_task_group() as tasks, session.paused():
        before = session.stats().scheduler.submitted
        tasks.start_soon(run)
        while session.stats().scheduler.submitted < before + requests:  # noqa: ASYNC110
            await anyio.sleep(0.005)
    return results[0]


@anyio_test
async def test_texts_and_scores_are_those_of_a_plain_loop() -> None:
    async with opening(**OPTIONS) as session:
        prompts = [[*prompt(1, 27), *end] for end in ([5, 6], [7], [8, 9, 10])]
        done = await together(session, lambda: session.generate(prompts, max_tokens=20), 3)
        assert [one.token_ids for one in done] == [plain(ids, 20) for ids in prompts]
        assert [one.usage.cached_tokens for one in done] == [0, 27, 27]
        ids, drawing = prompt(2, 30), {"temperature": 1.0, "max_tokens": 9, "seed": 3}
        drawn = await together(session, lambda: session.generate(ids, n=4, **drawing), 4)
        assert [one.usage.cached_tokens for one in drawn] == [0, 29, 29, 29]
        alone = [await session.generate(ids, n=4, **drawing) for _ in range(2)][1]  # from whole pages of the cache
        assert [one.token_ids for one in drawn] == [one.token_ids for one in alone]
        choices = [[4, 5], [6], [7, 8, 9]]
        scores = await together(session, lambda: session.score(prompt(3, 26), choices), 3)
        assert [score.cached_tokens for score in scores] == [0, 25, 25]
        assert [session.explain(score.id).cached_tokens for score in scores] == [0, 25, 25]
        for score, choice in zip(scores, choices, strict=True):
            (again,) = await session.score(prompt(3, 26), [choice])
            assert score.logprobs == pytest.approx(again.logprobs, abs=1e-5)
        wait_until_idle(session)


@pytest.mark.thorough
@pytest.mark.parametrize("kv_dtype", by_default(["int8-int4", "bfloat16", "int8"]))
def test_pages_of_any_type_are_copied_with_their_scales(kv_dtype: str) -> None:
    async def texts(**options: Any) -> list[tuple[int, ...]]:
        async with opening(kv_dtype=kv_dtype, **OPTIONS | options) as session:
            prompts = [[*prompt(4, 28), end] for end in (5, 6, 7)]
            done = await session.generate(prompts, max_tokens=20)
            assert [one.usage.cached_tokens for one in done][1:] == [28 if session.config.prefix_cache else 0] * 2
            return [one.token_ids for one in done]

    assert asyncio.run(texts()) == asyncio.run(texts(prefix_cache=False))


@pytest.mark.thorough
@anyio_test
async def test_drafts_a_preemption_and_steps_that_are_watched() -> None:
    """Pages for half of the requests: some are preempted, and copy or compute their beginnings again."""
    async with opening(**OPTIONS, device_pages=9, prompt_lookup=3) as session:
        prompts = [[*prompt(9, 27), *np.repeat(end, 3).tolist()] for end in range(5, 11)]
        handles = [session.submit(ids, max_tokens=24) for ids in prompts]
        copied = 0
        async with session.paused():
            while any(not handle.done for handle in handles):
                report = await session.step()
                copied += len(report.copied) if report is not None else 0
        for ids, handle in zip(prompts, handles, strict=True):
            assert (await handle).token_ids == plain(ids, 24)
        assert copied and session.stats().preemptions
        wait_until_idle(session)


@anyio_test
async def test_the_cache_says_what_a_prompt_hits() -> None:
    """What `session.cache.explain` says before, `usage.cached_tokens` says after: pages and a part of the next one."""
    async with opening(**OPTIONS) as session:
        for length in (21, 25, 32, 45):
            ids = prompt(20 + length, length)
            assert session.cache.explain(ids).cached_tokens == 0
            await session.generate(ids, max_tokens=16, ignore_eos=True)  # fills the prompt's last page
            told = session.cache.explain(ids)
            assert f"{length - 1} of {length} prompt tokens are cached ({length - 1} on the device)" in str(told)
            assert (told.reused_tokens, told.copies) == (length - 1, True)
            assert (await session.generate(ids, max_tokens=1)).usage.cached_tokens == told.cached_tokens == length - 1
        parts = [*ids[:40], 5, 6]
        told = session.cache.explain(parts)
        assert told.keys == session.cache.explain(ids).keys and len(told.keys) == 3, "the copied page's bar is marked"
        assert (await session.generate(parts, max_tokens=1)).usage.cached_tokens == told.cached_tokens == 40
