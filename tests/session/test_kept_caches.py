"""`swap_weights(…, cache="keep")`: the pages of weights come back with them, and are never used with others."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import rekindle
from helpers.driving import tiny_model
from helpers.plain_loop import plain_loop
from helpers.sessions import wait_until_idle
from helpers.small import CONTEXT, MODEL, opening, plain, prompt
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.models.base import LoadedModel
from rekindle.errors import CheckpointError, InvalidRequest

pytestmark = pytest.mark.anyio
OTHER = tiny_model(seed=6)
IDS = prompt(1, 30)
CACHED = 24  # tokens of whole pages


def arrays(model: LoadedModel) -> dict[str, Any]:
    return dict(zip(model.graph.paths, model.leaves, strict=True))


def plain_other(ids: list[int], count: int) -> tuple[int, ...]:
    return tuple(plain_loop(OTHER, ids, CONTEXT - len(ids), context=CONTEXT))[:count]


async def ask(session: Session) -> tuple[int, tuple[int, ...]]:
    """The tokens in host memory that a request would bring back, and its greedy text."""
    kept = session.cache.explain(IDS).host_tokens
    return kept, (await session.generate(IDS, max_tokens=6)).token_ids


async def test_pages_come_back_with_their_weights() -> None:
    one, two = arrays(MODEL), arrays(OTHER)
    texts = plain(IDS, 6), plain_other(IDS, 6)
    assert texts[0] != texts[1]
    async with opening(precompile="lazy", host_memory=1 << 22) as session:
        assert await session.swap_weights(one) == 1
        assert await ask(session) == (0, texts[0])
        assert await session.swap_weights(two, cache="keep") == 2
        assert await ask(session) == (0, texts[1]), "pages of other weights are never used"
        for _ in range(2):
            for weights, text in ((one, texts[0]), (two, texts[1])):
                await session.swap_weights(weights, cache="keep")
                kept, again = await ask(session)
                assert kept >= CACHED and again == text
        # Other arrays with the same numbers are others, and what was dropped is gone.
        await session.swap_weights({path: array + 0 for path, array in two.items()}, cache="keep")
        assert await ask(session) == (0, texts[1])
        await session.swap_weights(one)
        assert await ask(session) == (0, texts[0])
        await session.swap_weights(two, cache="keep")
        assert await ask(session) == (0, texts[1])
        wait_until_idle(session)


@pytest.mark.thorough
async def test_requests_go_on_with_the_new_weights() -> None:
    sets = arrays(MODEL), arrays(OTHER)
    async with opening(precompile="lazy", host_memory=1 << 22) as session:
        handles = [session.submit(prompt(seed, 9), max_tokens=40, ignore_eos=True) for seed in range(6)]
        for number in range(12):
            await anyio.sleep(0.02)
            assert await session.swap_weights(sets[number % 2], cache="keep") == number + 1
        for handle in handles:
            done = await handle
            assert len(done.token_ids) == 40 and list(done.weights_versions) == sorted(done.weights_versions)
        async with session.paused():
            await session.swap_weights(sets[0], cache="keep")
        assert (await session.generate(IDS, max_tokens=6)).token_ids == plain(IDS, 6)
        for weights in [arrays(tiny_model(seed=seed)) for seed in range(10, 16)]:  # more than are kept
            await session.swap_weights(weights, cache="keep")
            await session.generate(IDS, max_tokens=1)
        wait_until_idle(session)


async def test_what_can_not_be_kept_is_refused() -> None:
    async with opening(precompile="lazy", host_memory=0) as session:
        with pytest.raises(InvalidRequest, match="host_memory"):
            await session.swap_weights(OTHER, cache="keep")
        with pytest.raises(InvalidRequest, match="cache"):
            session.swap_weights(OTHER, cache="forget")  # type: ignore[arg-type]
    async with rekindle.open(MODEL, host_memory=1 << 20, **_options()) as session:
        await session.generate(IDS, max_tokens=1)
        session.pin(IDS)
        with pytest.raises(InvalidRequest, match="pinned"):
            await session.swap_weights(OTHER, cache="keep")
        session.unpin(IDS)
        with pytest.raises(CheckpointError):
            await session.swap_weights({"embed.weight": MODEL.leaves[0]}, cache="keep")
        kept, text = await ask(session)
        assert kept >= CACHED and text == plain(IDS, 6), "it goes on with the weights and pages that it has"
        await session.swap_weights(OTHER, cache="keep")
        assert (await session.generate(IDS, max_tokens=6)).token_ids == plain_other(IDS, 6)


def _options() -> dict[str, Any]:
    from helpers.small import OPTIONS

    return OPTIONS | {"precompile": "lazy"}
