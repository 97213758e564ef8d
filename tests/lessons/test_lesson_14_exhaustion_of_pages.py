"""When one request alone fills the KV pool it ends with "context" or a typed error; the others go on.

Upstream: https://github.com/GeeeekExplorer/nano-vllm/pull/277
One sequence larger than the pool hit a bare assert.
"""

from __future__ import annotations

import pytest

from helpers.sessions import expected, opened
from rekindle import FinishReason
from rekindle.errors import OutOfPages

PAGES = 9  # eight of eight tokens, beside the scratch page


@pytest.mark.anyio
async def test_lesson_14_a_prompt_that_exceeds_the_pool_is_told_so() -> None:
    with opened(num_pages=PAGES) as session:
        other = session.submit("short", max_tokens=20)
        with pytest.raises(OutOfPages, match="need 10 KV pages"):
            await session.generate("x" * 80, max_tokens=5)
        assert list((await other).token_ids) == expected("short", max_tokens=20)


@pytest.mark.anyio
async def test_lesson_14_a_request_that_outgrows_the_pool_ends_with_context() -> None:
    with opened(num_pages=PAGES) as session:
        done = await session.generate("x" * 30, max_tokens=400)
        assert done.finish_reason is FinishReason.CONTEXT
        assert len(done.token_ids) == 64 + 1 - 30
        assert list(done.token_ids) == expected("x" * 30, max_tokens=35)


@pytest.mark.anyio
async def test_lesson_14_two_that_do_not_fit_together_both_finish() -> None:
    with opened(num_pages=PAGES) as session:
        handles = [session.submit(letter * 20, max_tokens=40) for letter in "abcd"]
        for letter, handle in zip("abcd", handles, strict=True):
            assert list((await handle).token_ids) == expected(letter * 20, max_tokens=40)
