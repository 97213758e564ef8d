"""Adapters of a fleet: all replicas load them, new ones too, and a request keeps its weights wherever it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import jax
import numpy as np
import pytest

import rekindle
from helpers import adapters
from helpers.fleets import local_fleet
from helpers.sessions import eventually
from helpers.small import MODEL, OPTIONS, plain, prompt
from rekindle import Session
from rekindle.errors import CheckpointError, InvalidRequest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]
NEW = 8
GREEDY: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [adapters.write(root / str(seed), MODEL.config, seed=seed, rank=4) for seed in range(2)]


async def soon(condition: Callable[[], bool]) -> None:
    await anyio.to_thread.run_sync(lambda: eventually(condition))


def session() -> Session:
    options = {**OPTIONS, "precompile": "lazy", "max_adapters": 4, "max_adapter_rank": 16}
    return rekindle.open_sync(MODEL, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_all_replicas_load_them_and_those_that_come_later_too(folders: list[Path], tmp_path: Path) -> None:
    prompts = [prompt(seed, 12) for seed in range(4)]
    with local_fleet(session, router="round-robin") as (fleet, replicas):
        with pytest.raises(CheckpointError, match="neither a folder"):
            await fleet.load_adapter("a", tmp_path / "none")
        assert fleet.adapters == ()
        await fleet.load_adapter("a", folders[0])
        named = adapters.tensors(MODEL.config, adapters.modules(MODEL.config), 1, {}, rank=4)
        await fleet.load_adapter("b", named, alpha=8)  # the arrays of the other folder
        assert fleet.adapters == ("a", "b")
        for name, folder in zip("ab", folders, strict=True):
            handles = [fleet.submit(ids, adapter=name, **GREEDY) for ids in prompts]
            for handle, ids in zip(handles, prompts, strict=True):
                assert list((await handle).token_ids) == adapters.plain(MODEL, folder, ids, NEW)
        assert min(replica.session.stats().finished for replica in replicas if replica.session) > 1
        assert list((await fleet.generate(prompts[0], **GREEDY)).token_ids) == list(plain(prompts[0], NEW))

        replicas[0].die()
        await soon(lambda: replicas[0].lives == 2 and fleet.stats().ready == 2)
        again = [fleet.submit(ids, adapter="a", **GREEDY) for ids in prompts]
        for handle, ids in zip(again, prompts, strict=True):
            assert list((await handle).token_ids) == adapters.plain(MODEL, folders[0], ids, NEW)

        await fleet.unload_adapter("b")
        with pytest.raises(InvalidRequest, match=r"adapter='b'.*known: 'a'"):
            await fleet.generate(prompts[0], adapter="b")
        await soon(lambda: all(len(one.session.adapters) == 1 for one in replicas if one.session))


@pytest.mark.thorough
async def test_scores_and_vectors_have_them_in_every_replica(folders: list[Path]) -> None:
    texts, choice = [prompt(seed, 17, shared=9) for seed in range(3)], prompt(9, 2)
    with local_fleet(session, router="round-robin") as (fleet, replicas):
        for name, folder in zip("ab", folders, strict=True):
            await fleet.load_adapter(name, folder)
        for name, folder in (("a", folders[0]), ("b", folders[1]), (None, None)):
            scores = await fleet.score(texts, [choice], adapter=name)
            vectors = await fleet.embed(texts, normalize=False, adapter=name)
            for ids, (score,), vector in zip(texts, scores, vectors, strict=True):
                states, logits = adapters.plain_states(MODEL, folder, [*ids, *choice])
                expected = jax.nn.log_softmax(logits)[[16, 17], choice]
                np.testing.assert_allclose(score.logprobs, expected, rtol=0, atol=5e-5)
                np.testing.assert_allclose(vector, states[:17].mean(axis=0), rtol=0, atol=5e-5)
        assert min(replica.session.stats().finished for replica in replicas if replica.session) > 1
        for call in (fleet.score(texts, [choice], adapter="c"), fleet.embed(texts, adapter="c")):
            with pytest.raises(InvalidRequest, match="adapter='c': is not an adapter of this fleet; known: 'a', 'b'"):
                await call


@pytest.mark.thorough
async def test_a_request_that_moves_keeps_the_weights_it_began_with(folders: list[Path]) -> None:
    ids = prompt(5, 12)
    with local_fleet(session) as (fleet, replicas):
        await fleet.load_adapter("a", folders[0])
        running = fleet.submit(ids, adapter="a", max_tokens=40, ignore_eos=True)
        async for _ in running:
            break
        await fleet.load_adapter("a", folders[1])
        assert list((await fleet.generate(ids, adapter="a", **GREEDY)).token_ids) == adapters.plain(
            MODEL, folders[1], ids, NEW
        )
        name = fleet.explain(running).replica
        next(replica for replica in replicas if replica.name == name).die()
        done = await running
        assert list(done.token_ids) == adapters.plain(MODEL, folders[0], ids, 40)
        both = {"a": 0.5}
        half = {key: value * np.float32(0.5 * 2 if "_B" in key else 1) for key, value in _tensors(1).items()}
        got = await fleet.generate(ids, adapter=both, **GREEDY)
        assert list(got.token_ids) == adapters.plain(MODEL, half, ids, NEW)


def _tensors(seed: int) -> dict[str, Any]:
    return adapters.tensors(MODEL.config, adapters.modules(MODEL.config), seed, {}, rank=4)
