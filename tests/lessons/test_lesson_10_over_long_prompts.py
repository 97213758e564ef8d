"""A prompt that is too long raises a typed error at its caller; all other requests go on.

Upstream: https://github.com/sgl-project/sglang/issues/3910
A prompt over the limit crashed the server.
Upstream: https://github.com/vllm-project/vllm/issues/765
A prompt over the limit hung it.
"""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from helpers.sessions import opened
from rekindle import Sampling, Session
from rekindle.errors import PromptTooLong


def read_stream(session: Session) -> Any:
    async def read(prompt: str) -> None:
        async for _ in session.stream(prompt):
            pytest.fail("a delta of a prompt that does not fit")

    return read


@pytest.mark.anyio
async def test_lesson_10_an_over_long_prompt_reaches_its_caller_as_a_typed_error() -> None:
    with opened() as session:
        other = session.submit("fine", max_tokens=30)
        async with anyio.create_task_group() as group:
            group.start_soon(session.generate, "fine too", Sampling(max_tokens=5))
            for use in (session.generate, read_stream(session), session.submit):
                with pytest.raises(PromptTooLong, match="max_model_len is 512") as caught, anyio.fail_after(60):
                    await use("x" * 600)
                assert caught.value.field == "prompt"
        assert len((await other).token_ids) == 30


@pytest.mark.anyio
async def test_lesson_10_the_longest_prompt_that_fits_is_served() -> None:
    with opened() as session:
        done = await session.generate("x" * 511, max_tokens=5)
        assert len(done.token_ids) == 1 and done.finish_reason == "context"
        with pytest.raises(PromptTooLong):
            await session.generate("x" * 512, max_tokens=5)
