"""A request that needs more pages than there are ends by itself; the others go on.

Upstream: https://github.com/GeeeekExplorer/nano-vllm/pull/277
One sequence larger than the pool hit a bare assert.
"""

from __future__ import annotations

import pytest

from helpers.fakes import make_request
from helpers.scheduling import LoopBuilder, NoReserve
from helpers.sessions import expected, opened
from rekindle._src.core.records import FinishReason
from rekindle.errors import OutOfPages


@pytest.mark.parametrize("overlap", [False, True])
def test_lesson_14_a_single_request_uses_every_page_and_then_ends(overlap: bool) -> None:
    loop = LoopBuilder(pages=3, page_size=8, overlap=overlap).loop()
    greedy = make_request("x" * 10, max_tokens=500)
    loop.submit(greedy)
    loop.run()
    # 24 positions have keys, and the token sampled from the last of them needs none.
    assert (loop.reason(greedy), len(loop.output(greedy))) == (FinishReason.CONTEXT, 15)
    assert loop.output(greedy) == loop.model.generate(greedy, 15)


@pytest.mark.anyio
async def test_lesson_14_a_prompt_that_exceeds_the_pool_is_told_so() -> None:
    with opened(num_pages=9) as session:  # eight pages of eight tokens, and the scratch page
        other = session.submit("short", max_tokens=20)
        with pytest.raises(OutOfPages, match="80 tokens need 10 KV pages of 8, 8 can be used"):
            await session.generate("x" * 80, max_tokens=5)
        assert list((await other).token_ids) == expected("short", max_tokens=20)


def test_lesson_14_many_that_each_need_the_whole_pool_all_finish() -> None:
    loop = LoopBuilder(pages=4, page_size=8, max_requests=4).queue(reserve=NoReserve()).loop()
    requests = [make_request(f"request {index}", max_tokens=500, temperature=1.0, seed=index) for index in range(6)]
    for request in requests:
        loop.submit(request)
    loop.run()
    for request in requests:
        assert (loop.reason(request), len(loop.output(request))) == (FinishReason.CONTEXT, 33 - 9)
        assert loop.output(request) == loop.model.generate(request, 24)


@pytest.mark.parametrize("overlap", [False, True])
def test_lesson_04_the_context_ends_exactly_at_its_limit(overlap: bool) -> None:
    loop = LoopBuilder(max_model_len=20, overlap=overlap).loop()
    requests = [make_request("x" * length, max_tokens=30) for length in (1, 18, 19)]
    exactly = make_request("y" * 10, max_tokens=10)
    for request in (*requests, exactly):
        loop.submit(request)
    loop.run()
    for request in requests:
        count = 20 - request.prompt_length
        assert (loop.reason(request), len(loop.output(request))) == (FinishReason.CONTEXT, count)
        assert loop.output(request) == loop.model.generate(request, count)
    assert loop.reason(exactly) is FinishReason.LENGTH
