"""A cache hit whose padded rest reaches over the end of the context window gives the tokens of a cold run.

Upstream: https://github.com/tenstorrent/tt-metal/pull/54744
After a cached prefix, the padding of a last chunk ran past the end of the KV cache.
The form tested here, a clamped update that overwrites the prefix, was read in another engine's source.
"""

from __future__ import annotations

import pytest

from helpers.small import CONTEXT, PAGE, opening, plain, prompt
from rekindle import Session

pytestmark = pytest.mark.usefixtures("large_steps")
SHARED = CONTEXT - PAGE  # all pages but the last
ROOM = [1, 2, PAGE - 2]  # tokens that the window has left after the prompt; a rest of one token is a decode row


async def padded(session: Session, ids: list[int]) -> None:
    """Prefill `ids` in a step of its own; its padding has to reach beyond the window."""
    async with session.paused():
        handle = session.submit(ids, max_tokens=CONTEXT, ignore_eos=True)
        report = await session.step()
        (row,) = report.rows
        tokens = int(report.program.rpartition("t")[2])
        assert row.start == SHARED and row.start + tokens > CONTEXT, f"{report} is no test of this"
    done = await handle
    assert done.usage.cached_tokens == SHARED
    assert done.token_ids == plain(ids)


@pytest.mark.anyio
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_lesson_03_a_hit_at_the_end_of_the_window_equals_the_cold_output(room: int) -> None:
    ids = prompt(room, CONTEXT - room, shared=SHARED)
    other = prompt(50 + room, CONTEXT - room, shared=SHARED)
    async with opening() as session:
        assert (await session.generate(ids, max_tokens=CONTEXT, ignore_eos=True)).token_ids == plain(ids)
        await padded(session, ids)
        await padded(session, other)
        # Had the padding gone over the prefix, or over anybody's pages, this one would read it.
        await padded(session, ids)
        session.check_integrity()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_lesson_03_several_hits_at_capacity_prefill_together() -> None:
    prompts = [prompt(room, CONTEXT - room, shared=SHARED) for room in range(1, PAGE)]
    async with opening() as session:
        await session.generate(prompt(0, SHARED + 1, shared=SHARED), max_tokens=1)
        for done, ids in zip(await session.generate(prompts, max_tokens=CONTEXT), prompts, strict=True):
            assert done.usage.cached_tokens == SHARED
            assert done.token_ids == plain(ids)
        session.check_integrity()
