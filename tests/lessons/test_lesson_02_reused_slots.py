"""A result that arrives one step late, after its request has ended, never touches the request that has the slot next.

Upstream: https://github.com/sgl-project/sglang/pull/18803
A finished request's index was given away while the step before still used it.
"""

from __future__ import annotations

import pytest

from helpers.small import opening, plain, prompt
from helpers.thorough import by_default
from rekindle import FinishReason, Session

pytestmark = pytest.mark.usefixtures("large_steps")
NEW = 10


def ending(ids: list[int], after: int) -> int:
    """A token that ends the request after `after` tokens or a few more: one that did not come before."""
    tokens = plain(ids, NEW)
    return next(token for at, token in enumerate(tokens) if at >= after - 1 and token not in tokens[:at])


def late_rows(session: Session) -> int:
    """Rows that were computed for requests that had ended by then."""
    stats = session.stats()
    return int(stats.tokens - stats.prefill_tokens - (stats.generated_tokens - stats.finished))


@pytest.mark.anyio
@pytest.mark.parametrize("at_once", by_default([4, 1]))
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_lesson_02_every_request_in_a_reused_slot_gets_its_own_tokens_and_its_own_end(at_once: int) -> None:
    prompts = [prompt(seed, 2 + seed % 5) for seed in range(24)]
    # Every other one ends by a token value, which the host learns when the next step is on its way.
    stops = [(ending(ids, 2 + seed % 4),) if seed % 2 else () for seed, ids in enumerate(prompts)]
    async with opening(max_requests=at_once, precompile="lazy") as session:
        handles = [
            session.submit(ids, max_tokens=NEW, stop_token_ids=stop) for ids, stop in zip(prompts, stops, strict=True)
        ]
        for ids, stop, handle in zip(prompts, stops, handles, strict=True):
            done, whole = await handle, plain(ids, NEW)
            if stop:
                assert done.token_ids == whole[: whole.index(stop[0]) + 1]
                assert done.finish_reason is FinishReason.STOP
            else:
                assert done.token_ids == whole
                assert done.finish_reason is FinishReason.LENGTH
        assert late_rows(session) > 0, "no result ever came late"
        session.check_integrity()


@pytest.mark.anyio
async def test_lesson_02_an_aborted_occupant_leaves_nothing_to_the_next_one() -> None:
    """Cancelled while a step with it is in flight; the next request takes over its slot."""
    async with opening(max_requests=1, precompile="lazy") as session:
        for seed in range(6):
            ids, other = prompt(seed, 9), prompt(100 + seed, 5)
            victim = session.submit(ids, max_tokens=50, ignore_eos=True)
            follower = session.submit(other, max_tokens=NEW)
            async for _ in victim:
                victim.cancel()
                break
            assert (await follower).token_ids == plain(other, NEW)
        session.check_integrity()
