"""Requests that hit the prefix cache and requests that miss it prefill in the same batch, each as if it were alone.

Upstream: https://github.com/tanishqkumar/ssd/issues/23
One hit in a prefill batch made every row read the paged cache without its page table.
"""

from __future__ import annotations

import pytest

from helpers.small import PAGE, opening, plain, prompt
from rekindle import Session

pytestmark = pytest.mark.usefixtures("large_steps")
SHARED = 3 * PAGE
NEW = 12
HITS = [prompt(seed, SHARED + length, shared=SHARED) for seed, length in ((1, 2), (2, 5))]
MISSES = [prompt(seed, length) for seed, length in ((3, 7), (4, 3))]
ORDERS = {
    "hits first": [*HITS, *MISSES],
    "misses first": [*MISSES, *HITS],
    "in turns": [HITS[0], MISSES[0], HITS[1], MISSES[1]],
    "in turns, a miss first": [MISSES[1], HITS[1], MISSES[0], HITS[0]],
}


async def fill(session: Session) -> None:
    """What the hits are going to find."""
    warm = prompt(0, SHARED + 1, shared=SHARED)
    assert (await session.generate(warm, max_tokens=1)).token_ids == plain(warm, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_lesson_01_hits_and_misses_in_one_prefill_step_equal_their_solo_outputs(order: str) -> None:
    prompts = ORDERS[order]
    async with opening() as session:
        await fill(session)
        async with session.paused():
            handles = [session.submit(ids, max_tokens=NEW, ignore_eos=True) for ids in prompts]
            report = await session.step()
            assert [(row.kind, row.start) for row in report.rows] == [
                ("prefill", SHARED if ids in HITS else 0) for ids in prompts
            ], "they did not prefill together"
        for ids, handle in zip(prompts, handles, strict=True):
            done = await handle
            assert done.token_ids == plain(ids, NEW)
            assert done.usage.cached_tokens == (SHARED if ids in HITS else 0)
        session.check_integrity()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_lesson_01_long_misses_are_cut_into_chunks_beside_hits_and_decoding_rows() -> None:
    """Budgets end in the middle of a prompt, so that one step holds a chunk of a miss, a hit and decode rows."""
    long = [prompt(seed, 50) for seed in (5, 6, 7)]
    prompts = [HITS[0], long[0], HITS[1], long[1], MISSES[0], long[2], *HITS]
    mixed = False
    async with opening() as session:
        await fill(session)
        async with session.paused():
            handles = [session.submit(ids, max_tokens=NEW, ignore_eos=True) for ids in prompts]
            while (report := await session.step()) is not None:
                rows = {(row.kind, row.start > 0, row.token_id is not None) for row in report.rows}
                mixed |= rows >= {("decode", True, True), ("prefill", False, False)}
        assert mixed, "no step held all kinds of rows"
        assert [(await handle).token_ids for handle in handles] == [plain(ids, NEW) for ids in prompts]
        session.check_integrity()
