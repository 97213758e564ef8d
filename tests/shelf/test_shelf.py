"""`rekindle.shelf` with real sessions: tokens as alone, memory for one of three, what comes back and what leaks."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import jax
import pytest

import rekindle
from helpers import checkpoints
from helpers.sessions import engine_of, eventually, threads
from helpers.small import TINY
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle.errors import CheckpointError, ConfigError, InvalidRequest, SessionClosed

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]
OPTIONS: dict[str, Any] = {**TINY, "device_pages": 24, "host_memory": 1 << 20}
FAMILIES: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 64, "page_size": 8,
    "device_pages": 40, "precompile": "lazy", "disk_memory": 0, "quiet": True,
}  # fmt: skip


def device_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before, held = threads(), device_bytes()
    yield
    eventually(lambda: threads() <= before)
    eventually(lambda: device_bytes() <= held + (1 << 16))


async def test_sessions_of_a_notebook_wake_each_at_its_next_request() -> None:
    async with rekindle.shelf({"a": "tiny", "b": "tiny"}, max_loaded=1, **OPTIONS) as shelf:
        first, second = await shelf["a"].session(), await shelf["b"].session()
        assert first.asleep and not second.asleep and [shelf[name].state for name in shelf] == ["sleeping", "loaded"]
        want = (await second.generate("Once upon", max_tokens=6)).token_ids
        for session, other in ((first, second), (second, first)):
            assert (await session.generate("Once upon", max_tokens=6)).token_ids == want
            assert other.asleep
            deltas = [delta async for delta in other.stream("Once upon", max_tokens=6)]
            assert tuple(token for delta in deltas for token in delta.token_ids) == want and session.asleep
        figures = shelf.stats()
        assert [model.wakes >= 1 and model.loads == 1 for model in figures.models] == [True, True]
        assert 0 < figures.device_bytes == max(model.device_bytes or 0 for model in figures.models)
        await shelf["a"].unload()
        assert shelf["a"].state == "unloaded" and first.closed
        with pytest.raises(SessionClosed):
            await first.generate("Once", max_tokens=1)
        async with shelf["a"].use() as again:
            assert (await again.generate("Once upon", max_tokens=6)).token_ids == want
        await shelf.unload()
        assert {shelf[name].state for name in shelf} == {"unloaded"}


async def test_a_task_does_not_await_a_session_that_its_own_use_keeps_asleep() -> None:
    async with rekindle.shelf({"a": "tiny", "b": "tiny"}, max_loaded=1, **OPTIONS) as shelf:
        sleeping = await shelf["a"].session()
        async with shelf["b"].use():
            assert sleeping.asleep
            with pytest.raises(InvalidRequest, match="no room for both"):
                await sleeping.generate("Once upon", max_tokens=2)
            with pytest.raises(InvalidRequest, match="no room for both"):
                await anext(aiter(sleeping.stream("Once upon", max_tokens=2)))
        assert (await sleeping.generate("Once upon", max_tokens=2)).token_ids


@pytest.mark.thorough
async def test_a_training_is_a_use_of_its_model() -> None:
    async with rekindle.shelf({"a": "tiny", "b": "tiny"}, max_loaded=1, **OPTIONS) as shelf:
        session = await shelf["a"].session()
        run = session.tune("mine", ["Once upon a time"] * 4, steps=3, batch=2, max_length=16)
        assert shelf.stats().models[0].users >= 1
        async with shelf["b"].use():
            assert run.done and len(run.history) == 3, "the other model waited for its end"
        assert (await run).steps == 3 and shelf.stats().models[0].users == 0


@pytest.mark.thorough
async def test_a_pinned_prefix_is_no_reason_to_fail(caplog: pytest.LogCaptureFixture) -> None:
    """Pinned pages can't leave the device, so the model is unloaded."""
    async with rekindle.shelf({"a": "tiny", "b": "tiny"}, max_loaded=1, **OPTIONS) as shelf:
        async with shelf["a"].use() as session:
            await session.generate([7] * 80, max_tokens=1)
            assert session.pin([7] * 80) > 0
        async with shelf["b"].use():
            assert shelf["a"].state == "unloaded" and "can't sleep" in caplog.text
    assert shelf.closed and "closed" in repr(shelf) and "closed" in shelf._repr_html_()


@pytest.mark.thorough
async def test_what_can_not_be_loaded_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shelf = rekindle.shelf({"good": "tiny", "bad": tmp_path / "empty"}, **OPTIONS)
    with pytest.raises((CheckpointError, rekindle.UnsupportedModel)):
        await shelf["bad"].session()
    async with shelf["good"].use() as session:
        assert (await session.generate("Once", max_tokens=2)).token_ids
    await shelf.aclose()
    with pytest.raises(SessionClosed, match="shelf"):
        await shelf["good"].session()


def test_pages_are_fewer_where_the_memory_is_less_and_what_does_not_fit_is_refused() -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "device_pages"}
    with rekindle.shelf({"a": "tiny"}, memory="24MiB", **options) as shelf, shelf["a"].use() as session:
        weights = sum(leaf.nbytes for leaf in engine_of(session).device.model.leaves)
        assert weights + session.config.device_memory <= 24 << 20
        assert shelf.stats().device_bytes <= 24 << 20 and "MiB" in shelf._repr_html_()
        assert session.generate_sync("Once", max_tokens=2).token_ids
    with rekindle.shelf({"a": "tiny"}, memory=1 << 20, **options) as shelf, pytest.raises(rekindle.OutOfMemory):
        shelf["a"].session().result_sync()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"models": []}, "models"), ({"models": ["tiny", "tiny"]}, "models"), ({"models": {"a": 3}}, "models"),
        ({"models": {"a b": "tiny"}}, "models"), ({"max_loaded": 0}, "max_loaded"), ({"memory": "much"}, "memory"),
        ({"memory": 0}, "memory"), ({"idle_unload": 0}, "idle_unload"), ({"idle_unload": float("nan")}, "idle_unload"),
        ({"max_requests": 0}, "max_requests"), ({"no_such": 1}, "no_such"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_loaded(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rekindle.shelf(**{"models": ["tiny"], **given})
    assert refused.value.field == field


@pytest.mark.thorough
def test_an_unknown_name_is_told_the_others() -> None:
    shelf = rekindle.shelf(["tiny"], **OPTIONS)
    with pytest.raises(KeyError, match=r"not on the shelf\. Use one of 'tiny'"):
        shelf["huge"]
    assert "tiny" in shelf and "huge" not in shelf and len(shelf) == 1 and [*shelf] == ["tiny"]


def test_a_shelf_stays_as_long_as_one_of_its_models_and_no_longer() -> None:
    model = rekindle.shelf(["tiny"], **OPTIONS)["tiny"]
    gc.collect()
    assert not model.closed
    use = model.use()
    del model
    gc.collect()
    with use as session:
        gone = weakref.ref(session)
    del use, session
    gc.collect()
    eventually(lambda: gone() is None)


async def crowd(shelf: rekindle.Shelf, want: dict[str, tuple[int, ...]], count: int, ids: dict[str, Any]) -> None:
    """Requests at random among the models of a shelf: all answered, with the tokens of each alone."""
    draw = random.Random(0)
    most = shelf.stats().memory or 0

    async def ask(name: str) -> None:
        async with shelf[name].use() as session:
            figures = shelf.stats()
            assert figures.device_bytes <= most or not most
            assert (await session.generate(ids[name], max_tokens=len(want[name]))).token_ids == want[name]
            answered.append(name)

    answered: list[str] = []
    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(ask, draw.choice([*want]))
            await anyio.lowlevel.checkpoint()
    assert len(answered) == count


@pytest.mark.thorough
async def test_two_hundred_requests_among_three_families_with_memory_for_one(tmp_path: Path) -> None:
    names = ("llama", "qwen3", "gemma2")
    folders = {name: str(checkpoints.write(tmp_path / name, checkpoints.CASES[name])) for name in names}
    ids = {name: [token % 100 + 3 for token in range(seed, 200, 7)][:20] for seed, name in enumerate(names)}
    want, sizes = {}, {}
    for name in names:
        async with rekindle.open(folders[name], **FAMILIES) as session:
            want[name] = (await session.generate(ids[name], max_tokens=10)).token_ids
            weights = sum(leaf.nbytes for leaf in engine_of(session).device.model.leaves)
            sizes[name] = weights + session.config.device_memory
    memory = max(sizes.values()) + min(sizes.values()) // 2
    async with rekindle.shelf(folders, memory=memory, **FAMILIES) as shelf:
        await crowd(shelf, want, 200, ids)
        first = device_bytes()
        await crowd(shelf, want, 60, ids)
        assert device_bytes() <= max(first, memory) * 1.25
        for model in shelf.stats().models:
            print(f"{model.name}: {model.loads} loads, {model.wakes} wakes, {model.waits} waits, "
                  f"mean {model.mean_wait:.3f} s, longest {model.longest_wait:.3f} s")  # fmt: skip
            assert model.loads == 1 and model.users == 0
            assert model.device_bytes == pytest.approx(sizes[model.name], rel=0.02)


@pytest.mark.thorough
async def test_a_dozen_requests_at_random_with_room_for_one() -> None:
    async with rekindle.shelf({"a": "tiny", "b": "tiny", "c": "tiny"}, max_loaded=1, **OPTIONS) as shelf:
        async with shelf["a"].use() as session:
            want = (await session.generate("Once upon", max_tokens=6)).token_ids
        await crowd(shelf, dict.fromkeys("abc", want), 12, dict.fromkeys("abc", "Once upon"))


@pytest.mark.thorough
async def test_a_block_within_a_block_is_refused_where_there_is_room_for_one() -> None:
    async with rekindle.shelf({"a": "tiny", "b": "tiny"}, max_loaded=1, **OPTIONS) as shelf, shelf["a"].use():
        with pytest.raises(InvalidRequest, match="no room for both"):
            async with shelf["b"].use():
                raise AssertionError("both are loaded")
