"""`session.sleep` and `session.wake`: device memory comes back, programs stay, and the same tokens follow."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from flax import nnx

import rekindle
from helpers import checkpoints
from helpers.driving import tiny_model
from helpers.sessions import engine_of, wait_until_idle, writer_of
from helpers.small import MODEL, PAGE, TINY, opening, plain, prompt
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle.errors import CheckpointError, InvalidRequest, RekindleError, RequestFailed
from rekindle.models import merge

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]
IDS = prompt(1, 30)


def device_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("mode", by_default(["host", "drop"]))
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_memory_comes_back_and_the_same_tokens_follow(mode: Any, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])
    options: dict[str, Any] = {
        "dtype": "float32", "max_requests": 2, "max_tokens_per_step": 32, "max_model_len": 64, "page_size": 8,
        "device_pages": 32, "precompile": "lazy", "host_memory": 1 << 22, "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    before = device_bytes()
    async with rekindle.open(str(folder), **options) as session:
        ids = [token % 150 for token in IDS]
        want = (await session.generate(ids, max_tokens=12)).token_ids
        again = await session.generate(ids, max_tokens=12)
        assert again.token_ids == want
        held = device_bytes() - before
        report = await session.sleep(weights=mode)
        assert session.asleep and report.weights_bytes > 0 and report.page_bytes > 0
        left = device_bytes() - before
        # What is left are outputs of the last step, and on CPU pages that went to host memory.
        assert left < held / 4 and abs(held - left - report.freed_bytes) < held / 4
        assert report.pages_kept == (len(ids) + len(want) - 1) // 8
        assert await session.wake() > 0
        assert session.cache.explain(ids).host_tokens > 0
        assert (await session.generate(ids, max_tokens=12)).token_ids == want
        assert device_bytes() - before <= held + held / 4
        compiled = session.stats().compilations  # those that move pages, too
        await session.sleep(weights=mode)
        await session.wake()
        assert (await session.generate(ids, max_tokens=12)).token_ids == want
        assert session.stats().compilations == compiled
        wait_until_idle(session)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_matrices_in_groups_of_a_file_are_read_again_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    rekindle.models.export("tiny", file, type="q4_0")
    options = {name: value for name, value in TINY.items() if name != "dtype"}
    async with rekindle.open(file, **options) as session:
        assert "in the groups of the checkpoint" in session.weights
        want = (await session.generate("Once", max_tokens=6)).token_ids
        await session.sleep(weights="drop")
        await session.wake()
        assert (await session.generate("Once", max_tokens=6)).token_ids == want


@pytest.mark.thorough
async def test_what_was_to_be_saved_when_it_fell_asleep_is_left_out(tmp_path: Path) -> None:
    """The thread that saves pages in the background may have chosen some before they were given back."""
    async with opening(precompile="lazy", cache_dir=str(tmp_path), disk_memory=1 << 24, host_memory=0) as session:
        await session.generate(IDS, max_tokens=5)
        writer = writer_of(session)
        found = await anyio.to_thread.run_sync(lambda: list(writer._find(lambda node, digest, now: True)))
        assert any(record.on_device for record in found)
        await session.sleep()
        assert await anyio.to_thread.run_sync(writer.payloads, found) == []
        assert await session.save("asleep")
        await session.wake()
        assert (await session.generate(IDS, max_tokens=5)).token_ids == plain(IDS, 5)


async def test_requests_wait_and_go_on_with_their_tokens() -> None:
    async with opening(precompile="lazy") as session:
        running = session.submit(IDS, max_tokens=25)
        async for _ in running:
            break
        await session.sleep()
        late = session.submit(prompt(2, 9), max_tokens=5)
        with pytest.raises(RekindleError, match="sleep"):
            await late  # by the task that put it to sleep
        late = session.submit(prompt(2, 9), max_tokens=5)
        with anyio.move_on_after(0.05) as scope:
            await anyio.sleep(1)
        assert scope.cancelled_caught and not running.done and not late.done
        with pytest.raises(InvalidRequest, match="sleeps already"):
            await session.sleep()
        with pytest.raises(InvalidRequest, match="wake"):
            await session.swap_weights(tiny_model(seed=6))
        await session.wake()
        assert (await running).token_ids == plain(IDS, 25)
        assert (await late).token_ids == plain(prompt(2, 9), 5)
        with pytest.raises(InvalidRequest, match="does not sleep"):
            await session.wake()
        wait_until_idle(session)


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_it_wakes_with_other_weights() -> None:
    """A trainer had the device meanwhile; its arrays take the place of the old ones."""
    other = tiny_model(seed=6)
    async with opening(precompile="lazy") as session:
        first = await session.generate(IDS, max_tokens=4)
        await session.sleep()
        await session.wake(nnx.state(merge(other.graph, other.leaves), nnx.Param))
        done = await session.rollout(IDS, n=1, max_tokens=4, temperature=0.0)
        assert done.completions[0].weights_versions == (1, 1, 1, 1) != first.weights_versions
        async with rekindle.open(other, **_options()) as plainly:
            assert (await plainly.generate(IDS, max_tokens=4)).token_ids == done.completions[0].token_ids
        leaves = engine_of(session).runner.calls.leaves
        assert [leaf.unsafe_buffer_pointer() for leaf in leaves] == [
            leaf.unsafe_buffer_pointer() for leaf in other.leaves
        ]


async def test_what_can_not_be_brought_back_is_refused() -> None:
    async with opening(precompile="lazy") as session:
        with pytest.raises(InvalidRequest, match="folder"):
            await session.sleep(weights="drop")
        with pytest.raises(InvalidRequest, match="weights"):
            session.sleep(weights="away")  # type: ignore[arg-type]
        await session.generate(IDS, max_tokens=1)
        assert not session.asleep and session.pin(IDS) == len(IDS) // PAGE * PAGE
        with pytest.raises(InvalidRequest, match="pinned"):
            await session.sleep()
        session.unpin(IDS)
        await session.sleep()
        with pytest.raises(CheckpointError):
            await session.wake({"nothing": np.zeros(3)})
        assert session.asleep
        await session.wake()
        assert (await session.generate(IDS, max_tokens=4)).token_ids == plain(IDS, 4)
        await session.sleep()  # a sleeping session can be closed


@pytest.mark.parametrize(
    "cycles", [pytest.param(3, marks=pytest.mark.thorough), pytest.param(100, marks=pytest.mark.slow)]
)
async def test_cycles_leak_nothing(cycles: int) -> None:
    async with opening(precompile="lazy", host_memory=1 << 20) as session:
        want = plain(IDS, 6)
        sizes = []
        for _ in range(cycles):
            assert (await session.generate(IDS, max_tokens=6)).token_ids == want
            sizes.append(device_bytes())
            await session.sleep()
            await session.wake()
        # But for the outputs of the last step, and pages in host memory, which on CPU are arrays, too.
        assert sizes[-1] <= 1.25 * sizes[min(1, cycles - 2)]
        session.check_integrity()
        assert MODEL.leaves[0].is_deleted() is False, "the caller's arrays are the caller's"


def _options() -> dict[str, Any]:
    from helpers.small import OPTIONS

    return OPTIONS | {"precompile": "lazy"}


async def test_a_request_wakes_a_session_that_sleeps_until_one_comes() -> None:
    """The very task that put it to sleep may await it: nobody has to wake it."""
    async with opening(precompile="lazy") as session:
        for _ in range(2):
            await session.sleep(until="request")
            assert session.asleep
            assert (await session.generate(IDS, max_tokens=4)).token_ids == plain(IDS, 4)
            assert not session.asleep
        await session.sleep(until="request")
        assert await session.wake() > 0
        await session.sleep()  # until wake() again
        with pytest.raises(RekindleError, match="put it to sleep"):
            await session.generate(IDS, max_tokens=1)
        await session.wake()
        with pytest.raises(InvalidRequest, match="until"):
            session.sleep(until="tomorrow")  # type: ignore[arg-type]
        wait_until_idle(session)


async def test_requests_that_run_when_it_falls_asleep_wake_it_and_go_on() -> None:
    async with opening(precompile="lazy") as session:
        async with anyio.create_task_group() as group:
            done: list[Any] = []

            async def ask() -> None:
                done.append(await session.generate(IDS, max_tokens=20))

            stream = session.stream(IDS, max_tokens=20)
            deltas = aiter(stream)
            await anext(deltas)
            group.start_soon(ask)
            await session.sleep(until="request")
            rest = [delta async for delta in deltas]
        assert rest[-1].finish_reason is not None and stream.token_ids == plain(IDS, 20)
        assert done[0].token_ids == plain(IDS, 20)
        wait_until_idle(session)


async def test_requests_are_told_why_it_could_not_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opening(precompile="lazy") as session:
        await session.sleep(until="request")
        device = engine_of(session).device

        def lost(weights: object) -> None:
            raise CheckpointError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(device, "wake", lost)
            for _ in range(2):  # each request tries
                with pytest.raises(CheckpointError, match="the disk is gone"):
                    await session.generate(IDS, max_tokens=4)
            assert session.asleep
        assert (await session.generate(IDS, max_tokens=4)).token_ids == plain(IDS, 4)
        await session.sleep(until="request")
        with monkeypatch.context() as patch:
            patch.setattr(device, "wake", lambda weights: 1 // 0)
            with pytest.raises(RequestFailed, match="could not wake"):
                await session.generate(IDS, max_tokens=4)
        wait_until_idle(session)
