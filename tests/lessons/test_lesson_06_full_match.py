"""A full-prompt match leaves at least one token to compute, because its logits are needed.

Upstream: https://github.com/GeeeekExplorer/nano-vllm/issues/144
With every block cached, attention was called with no query and raised.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers.fakes import make_request
from helpers.scheduling import LoopBuilder
from helpers.small import PAGE, opening, plain, prompt
from helpers.thorough import by_default

pytestmark = pytest.mark.usefixtures("large_steps")


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17])
def test_lesson_06_a_fully_cached_prompt_computes_its_last_token(length: int) -> None:
    loop = LoopBuilder(page_size=8).loop()
    for turn in range(3):
        request = make_request("p" * length, max_tokens=3)
        loop.submit(request)
        loop.run()
        assert loop.output(request) == loop.model.generate(request)
        cached = min(length // 8 * 8, length - 1)
        assert loop.events[request.id][-1].cached_tokens == (0 if turn == 0 else cached)


def test_lesson_06_prompts_of_whole_pages_that_are_cached_share_one_decode_step() -> None:
    """Their last pages are there, so only the logits of their last tokens are computed, and nothing is written."""
    loop = LoopBuilder(page_size=8, max_requests=4, max_tokens_per_step=64).loop()
    texts = [f"sixteen letters{index}" for index in range(4)]
    for turn in range(2):
        requests = [make_request(text, max_tokens=1) for text in texts]
        for request in requests:
            loop.submit(request)
        loop.run()
        assert [loop.output(request) for request in requests] == [loop.model.generate(request) for request in requests]
        if turn:
            plan = loop.runner.plans[-1]
            assert len(plan.decode) == 4 and not plan.prefill and all(row.kept for row in plan.decode)


@pytest.mark.anyio
@pytest.mark.parametrize("options", by_default([{}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.3}]), ids=str)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_lesson_06_the_tokens_after_a_prompt_that_is_cached_whole_are_those_of_a_cold_one(
    options: dict[str, Any],
) -> None:
    prompts = [prompt(seed, 3 * PAGE, shared=PAGE) for seed in range(4)]
    async with opening() as session:
        cold = [await session.generate(ids, max_tokens=12, ignore_eos=True, **options) for ids in prompts]
        async with session.paused():
            handles = [session.submit(ids, max_tokens=12, ignore_eos=True, **options) for ids in prompts]
            report = await session.step()
            assert {row.kind for row in report.rows} == {"prefill" if "prompt_logprobs" in options else "decode"}
        warm = [await handle for handle in handles]
        assert [one.token_ids for one in warm] == [one.token_ids for one in cold]
        if not options:
            assert [one.token_ids for one in warm] == [plain(ids, 12) for ids in prompts]
            assert {one.usage.cached_tokens for one in warm} == {3 * PAGE - 1}
        session.check_integrity()
