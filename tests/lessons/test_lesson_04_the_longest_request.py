"""At the maximum length a request ends with the reason "length", and every token up to there is right.

Upstream: https://github.com/Nehanth/swarmllm/issues/31
Generation ran past the context, over the end of the KV cache, and went on with garbage.
"""

from __future__ import annotations

import pytest

from helpers.small import CONTEXT, PAGE, opening, plain, prompt
from rekindle import FinishReason
from rekindle.errors import PromptTooLong

pytestmark = pytest.mark.usefixtures("large_steps")
LENGTHS = [1, PAGE, 31, 33, CONTEXT - PAGE, CONTEXT - 2, CONTEXT - 1]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_lesson_04_each_request_ends_at_the_limit_with_the_plain_loops_tokens() -> None:
    prompts = [prompt(length, length) for length in LENGTHS]
    async with opening() as session:
        for ids in prompts:  # alone
            done = await session.generate(ids, max_tokens=10 * CONTEXT, ignore_eos=True)
            assert (done.finish_reason, len(done.token_ids)) == (FinishReason.CONTEXT, CONTEXT - len(ids))
            assert done.token_ids == plain(ids)
        together = await session.generate(prompts, max_tokens=10 * CONTEXT, ignore_eos=True)
        assert [done.token_ids for done in together] == [plain(ids) for ids in prompts]
        assert {done.finish_reason for done in together} == {FinishReason.CONTEXT}
        session.check_integrity()


@pytest.mark.anyio
async def test_lesson_04_beside_the_limit_the_reason_is_the_right_one() -> None:
    async with opening() as session:
        for length in (CONTEXT // 2, CONTEXT - 1):
            ids, room = prompt(length, length), CONTEXT - length
            exactly = await session.generate(ids, max_tokens=room)
            assert (exactly.token_ids, exactly.finish_reason) == (plain(ids), FinishReason.LENGTH)
            over = await session.generate(ids, max_tokens=room + 1)
            assert (over.token_ids, over.finish_reason) == (plain(ids), FinishReason.CONTEXT)
        with pytest.raises(PromptTooLong, match=f"max_model_len is {CONTEXT}"):
            await session.generate(prompt(1, CONTEXT), max_tokens=1)


@pytest.mark.anyio
async def test_lesson_04_a_neighbour_goes_on_unharmed_when_another_one_ends_at_the_limit() -> None:
    short, long = prompt(1, 3), prompt(2, CONTEXT - 3)
    async with opening() as session:
        handles = [session.submit(ids, max_tokens=CONTEXT, ignore_eos=True) for ids in (short, long, short, long)]
        tokens = [(await handle).token_ids for handle in handles]
        assert tokens == [plain(short), plain(long)] * 2
        session.check_integrity()
