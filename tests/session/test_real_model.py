"""Sessions over the real scheduler, runner and programs: a two-layer model with random weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import rekindle
from helpers.driving import tiny_model
from helpers.sessions import eventually, threads, wait_until_idle
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle.errors import CheckpointError, ConfigError, InvalidRequest

pytestmark = pytest.mark.usefixtures("large_steps")
OPTIONS: dict[str, Any] = {
    "max_requests": 2, "max_tokens_per_step": 32, "max_model_len": 128, "page_size": 16, "device_pages": 24,
    "precompile": "lazy", "dtype": "float32", "seed": 0,
}  # fmt: skip
PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that every session after the first finds its programs compiled."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def session(cache_dir: Path) -> Iterator[Session]:
    # Without a disk tier, whose writer reads pages out when it pleases: a test counts the arrays of the process.
    with rekindle.open_sync(tiny_model(), cache_dir=str(cache_dir), disk_memory=0, **OPTIONS) as made:
        made.generate_sync(PROMPT, max_tokens=2)
        yield made
        wait_until_idle(made)


@pytest.mark.anyio
async def test_generation_is_reproducible_and_hits_the_cache(session: Session) -> None:
    await session.cache.clear(tier="memory")
    cold = await session.generate(PROMPT, max_tokens=12)
    warm = await session.generate(PROMPT, max_tokens=12)
    # Two pages, and of the third, which the text has filled, all but the last token.
    assert cold.usage.cached_tokens == 0 and warm.usage.cached_tokens == 39
    assert cold.token_ids == warm.token_ids
    assert [t async for delta in session.stream(PROMPT, max_tokens=12) for t in delta.token_ids] == list(cold.token_ids)
    one = await session.generate(PROMPT, max_tokens=12, temperature=1.0, seed=4)
    two = await session.generate([PROMPT, PROMPT], max_tokens=12, temperature=1.0, seed=4)
    assert {done.token_ids for done in two} == {one.token_ids}


@pytest.mark.anyio
async def test_a_fork_shares_pages_and_repeats(session: Session) -> None:
    done = await session.generate(PROMPT, max_tokens=20, temperature=1.0, seed=9)
    same = await session.fork(done, at=10)
    assert same.token_ids == done.token_ids[10:] and same.usage.cached_tokens >= 32


@pytest.mark.anyio
async def test_single_steps_report(session: Session) -> None:
    async with session.paused():
        handle = session.submit(PROMPT, max_tokens=2)
        reports = [await session.step() for _ in range(3)]
    assert reports[0] is not None and reports[0].program and handle.id in str(reports[0])
    assert len((await handle).token_ids) == 2


@pytest.mark.anyio
async def test_pinned_prompts_stay(session: Session) -> None:
    pinned = [99, *PROMPT[1:]]
    await session.generate(pinned, max_tokens=1)
    assert session.pin(pinned) == 32
    for i in range(12):
        await session.generate([50 + i] * 60, max_tokens=1)
    assert (await session.generate(pinned, max_tokens=1)).usage.cached_tokens == 32
    assert session.unpin(pinned) == 32


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_swapped_weights_are_used_at_once_without_compiling(cache_dir: Path) -> None:
    async with rekindle.open(tiny_model(), cache_dir=str(cache_dir), **OPTIONS) as session:
        before = await session.generate(PROMPT, max_tokens=10)
        running = session.submit(PROMPT[::-1], max_tokens=60, ignore_eos=True)
        async for _ in running:
            break
        compiled = session.stats().compilations
        await session.swap_weights(tiny_model(seed=1))
        after = await session.generate(PROMPT, max_tokens=10)
        assert after.usage.cached_tokens == 0 and after.token_ids != before.token_ids
        assert len((await running).token_ids) == 60, "a request in flight was lost"
        assert session.stats().compilations == compiled
        await session.swap_weights(tiny_model())
        assert (await session.generate(PROMPT, max_tokens=10)).token_ids == before.token_ids
        with pytest.raises(CheckpointError):
            await session.swap_weights({"nothing": 1})
        assert (await session.generate(PROMPT, max_tokens=10)).token_ids == before.token_ids


@pytest.mark.anyio
async def test_lesson_21_live_buffers_after_close_are_those_before_open(cache_dir: Path) -> None:
    import jax

    model = tiny_model()
    gc.collect()
    buffers, running = len(jax.live_arrays()), threads()
    session = await rekindle.open(model, cache_dir=str(cache_dir), **OPTIONS)
    handles = [session.submit(PROMPT, max_tokens=80) for _ in range(6)]
    with anyio.move_on_after(0.5):
        await handles[0]
    assert len(jax.live_arrays()) > buffers
    await session.aclose()
    gc.collect()
    eventually(lambda: threads() <= running)
    assert len(jax.live_arrays()) <= buffers


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_requests"):
        rekindle.open("tiny", max_request=3)


def test_a_snapshot_is_restored_by_its_name_alone(cache_dir: Path) -> None:
    with pytest.raises(ConfigError, match="can't be a snapshot's name"):
        rekindle.open_sync(tiny_model(), cache_dir=str(cache_dir), restore="a name", **OPTIONS)


@pytest.mark.anyio
async def test_a_missing_folder_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        await rekindle.open("/nowhere/at/all")


def test_tokens_of_other_models_are_refused(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="from 0 to 319"):
        session.generate_sync([320])
