"""Roles: prompts are computed in one replica and answered in another, with the tokens of one session."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.fleets import LocalReplica, local_fleet
from helpers.sessions import CONFIG, client_of, eventually, fake_session, writer_of
from rekindle import ConfigError, FinishReason, Fleet
from rekindle._src.capabilities.pooling.request import PromptPooling
from rekindle._src.core.extension import Extensions
from rekindle._src.core.records import Request
from rekindle._src.core.sampling import Sampling
from rekindle._src.replicas.routing import goes_two_ways, prompt_only, roles_of
from rekindle._src.session.session import Session

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]

MODEL = checkpoints.case("llama")
LENGTH = 100
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "page_size": 8, "device_pages": 257, "max_requests": 4, "max_tokens_per_step": 32,
    "max_model_len": 192, "disk_memory": 0, "precompile": "lazy", "quiet": True,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 7, "n": 3},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 20},
    {"salt": "mine", "temperature": 0.5, "seed": 1},
    {"max_tokens": 1},
]


@functools.cache
def prompt(index: int, length: int = LENGTH) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(index).integers(3, 160, length))


def told(done: Any) -> Any:
    """What must not depend on where a request ran; numbers to the rounding of float32."""
    if isinstance(done, list):
        return [told(one) for one in done]
    scores = [[round(one.logprob, 3) for one in part or ()] for part in (done.logprobs, done.prompt_logprobs)]
    return done.token_ids, done.finish_reason, scores, done.usage.completion_tokens, done.usage.prompt_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def alone(folder: str) -> Iterator[Session]:
    with rekindle.open_sync(MODEL, cache_dir=folder, **OPTIONS) as session:
        yield session


@contextmanager
def apart(folder: str, prefill: int = 1, decode: int = 1) -> Iterator[tuple[Fleet, list[LocalReplica]]]:
    make = lambda: rekindle.open_sync(MODEL, cache_dir=folder, **OPTIONS)  # noqa: E731
    with local_fleet(make, roles={"prefill": prefill, "decode": decode}) as found:
        yield found


async def expected(alone: Session, index: int, options: dict[str, Any]) -> Any:
    await alone.cache.clear()
    return told(await alone.generate(list(prompt(index)), **{"max_tokens": 24, "ignore_eos": True, **options}))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_tokens_are_those_of_one_session(folder: str, alone: Session) -> None:
    with apart(folder) as (fleet, replicas):
        for index, options in enumerate(VARIANTS):
            given = {"max_tokens": 24, "ignore_eos": True, **options}
            done = await fleet.generate(list(prompt(index)), **given)
            assert told(done) == await expected(alone, index, options), options
        prefill, decode = replicas
        assert prefill.session is not None and decode.session is not None
        apart_ones = len(VARIANTS) - 1 + 2  # but the one with a single token; three sequences of n=3
        assert prefill.session.stats().generated_tokens == apart_ones
        pulls = decode.replica.pulls  # type: ignore[union-attr]
        assert pulls is not None and pulls.failed == 0
        assert (len(VARIANTS) - 1) * (LENGTH // 8) <= pulls.pages <= apart_ones * (LENGTH // 8)
        assert decode.session.stats().prefill_tokens == LENGTH + apart_ones * (LENGTH % 8 + 1)
        for replica in replicas:
            eventually(lambda replica=replica: replica.session.stats().live == 0)
            replica.session.check_integrity()  # type: ignore[union-attr]
        stats = fleet.stats()
        assert (stats.handed_over, stats.lost, stats.moved) == (apart_ones, 0, 0)
        assert [one.role for one in stats.replicas] == ["prefill", "decode"]
        assert "decode" in stats._repr_html_()


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_many_streams_at_once(folder: str, alone: Session) -> None:
    found: dict[int, Any] = {}
    with apart(folder, prefill=1, decode=2) as (fleet, _):

        async def ask(index: int) -> None:
            deltas = [delta async for delta in fleet.stream(list(prompt(index)), max_tokens=24, ignore_eos=True)]
            found[index] = tuple(token for delta in deltas for token in delta.token_ids)

        async with anyio.create_task_group() as group:
            for index in range(12):
                group.start_soon(ask, index)
        assert fleet.stats().handed_over == 12
    for index in range(12):
        assert found[index] == (await expected(alone, index, {}))[0]


@pytest.mark.thorough
async def test_where_pages_can_not_be_taken_the_prompt_is_computed(folder: str, alone: Session) -> None:
    with apart(folder) as (fleet, replicas):
        shared = client_of(replicas[0].session).shared[0]  # type: ignore[union-attr]
        shared.close()
        done = await fleet.generate(list(prompt(50)), max_tokens=24, ignore_eos=True)
        assert told(done) == await expected(alone, 50, {})
        pulls = replicas[1].replica.pulls  # type: ignore[union-attr]
        assert pulls is not None and (pulls.failed, pulls.pages) == (1, 0)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_death_on_either_side_costs_a_pause(folder: str, alone: Session) -> None:
    wanted = await expected(alone, 60, {"max_tokens": 60, "temperature": 0.9, "seed": 3})
    for victim in (0, 1):
        with apart(folder) as (fleet, replicas):
            handle = fleet.submit(list(prompt(60)), max_tokens=60, ignore_eos=True, temperature=0.9, seed=3)
            await aiter(handle).__anext__()
            replicas[victim].die()
            with anyio.fail_after(60):
                assert told(await handle) == wanted


async def test_short_prompts_and_embeddings_stay_in_one_place() -> None:
    with local_fleet(roles={"prefill": 1, "decode": 1}) as (fleet, _):
        done = await fleet.generate("short", max_tokens=5)
        assert done.text and fleet.stats().handed_over == 0
        assert [one.routed for one in fleet.stats().replicas] == [0, 1]
        done = await fleet.generate("long " * 30, max_tokens=5)
        assert fleet.stats().handed_over == 1


async def test_cancelled_before_its_pages_have_come(folder: str) -> None:
    with apart(folder) as (fleet, replicas):
        handles = [fleet.submit(list(prompt(index)), max_tokens=60, ignore_eos=True) for index in range(70, 76)]
        await aiter(handles[0]).__anext__()
        for handle in handles:
            handle.cancel()
        for replica in replicas:
            await anyio.to_thread.run_sync(lambda replica=replica: eventually(lambda: whole(replica.session)))
        pulls = replicas[1].replica.pulls  # type: ignore[union-attr]
        assert pulls is not None
        await anyio.to_thread.run_sync(lambda: eventually(lambda: pulls._held == 0))
        host = writer_of(replicas[1].session).tiers.host  # type: ignore[union-attr]
        await anyio.to_thread.run_sync(lambda: eventually(lambda: host.statistics().held == 0))


def whole(session: Any) -> bool:
    stats = session.stats()
    return bool(stats.live == 0)


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_replica_that_was_replaced_takes_pages_from_its_neighbour(folder: str) -> None:
    make = lambda: rekindle.open_sync(MODEL, cache_dir=folder, **OPTIONS)  # noqa: E731
    with local_fleet(make, replicas=2, router="round-robin") as (fleet, replicas):
        for index in (80, 80, 81, 81):
            await fleet.generate(list(prompt(index)), max_tokens=4, ignore_eos=True)
        replicas[0].die()
        again = lambda: replicas[0].lives == 2 and fleet.stats().replicas[0].state == "ready"  # noqa: E731
        await anyio.to_thread.run_sync(lambda: eventually(again, 60))
        pulls = replicas[0].replica.pulls  # type: ignore[union-attr]
        assert pulls is not None
        await anyio.to_thread.run_sync(lambda: eventually(lambda: pulls.pages >= 2 * (LENGTH // 8)))
        done = replicas[0].session.generate_sync(list(prompt(81)), max_tokens=2)  # type: ignore[union-attr]
        assert done.usage.cached_tokens == LENGTH // 8 * 8


async def test_scaling_changes_those_that_decode() -> None:
    with local_fleet(lambda: fake_session(CONFIG), roles={"prefill": 1, "decode": 1}) as (fleet, replicas):
        with pytest.raises(ConfigError, match="leaves none to decode"):
            fleet.scale(1)
        await fleet.scale(3)
        assert [replica.role for replica in replicas] == ["prefill", "decode", "decode"]
        await fleet.scale(2, drain=5)
        assert [one.role for one in fleet.stats().replicas] == ["prefill", "decode"]


def test_roles_are_checked() -> None:
    assert roles_of(None, None) == ("both", "both")
    assert roles_of({"prefill": 1, "decode": 2}, 3) == ("prefill", "decode", "decode")
    for roles, replicas, match in (
        ({"prefill": 1}, None, "roles"),
        ({"prefill": 0, "decode": 1}, None, "prefill"),
        ({"prefill": 1, "decode": 1}, 3, "sum"),
        (None, 0, "replicas"),
    ):
        with pytest.raises(ConfigError, match=match):
            roles_of(roles, replicas)  # type: ignore[arg-type]


def test_what_goes_two_ways() -> None:
    tokens = np.arange(100, dtype=np.int32)
    request = Request("a", tokens, Sampling(max_tokens=10, min_tokens=5, seed=1))
    assert goes_two_ways(request, 512) and not goes_two_ways(request, 101)
    assert (prompt_only(request).sampling.max_tokens, prompt_only(request).sampling.min_tokens) == (1, 1)
    assert not goes_two_ways(Request("a", tokens[:20], Sampling()), 512)
    assert not goes_two_ways(Request("a", tokens, Sampling(max_tokens=1)), 512)
    assert not goes_two_ways(Request("a", tokens, Sampling(), extensions=Extensions(PromptPooling("mean"))), 512)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_end_with_the_first_token_is_an_end(folder: str, alone: Session) -> None:
    first = (await expected(alone, 90, {}))[0][0]
    with apart(folder) as (fleet, _):
        done = await fleet.generate(list(prompt(90)), max_tokens=24, stop_token_ids=[first])
        assert (done.finish_reason, fleet.stats().handed_over) == (FinishReason.STOP, 0)
