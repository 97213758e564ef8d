"""Opening: what it awaits, what it raises, what it frees, and the JAX contexts it takes along."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from helpers import checkpoints
from helpers.python import run_python
from helpers.sessions import CONFIG, eventually, fake_front, threads
from rekindle._src.dispatch.backend import Front
from rekindle._src.session import opening as opening_module
from rekindle._src.session.opening import Opening
from rekindle.errors import OutOfMemory


@pytest.mark.anyio
async def test_opening_is_awaited_once_and_reused() -> None:
    opening = Opening(fake_front)
    session = await opening
    assert await opening is session
    await session.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("error", [OutOfMemory("asked for 3 GiB, 1 GiB is free"), ZeroDivisionError("a defect")])
async def test_errors_while_opening_reach_the_caller_and_leave_nothing(error: Exception) -> None:
    before = threads()

    def build() -> Front:
        raise error

    with pytest.raises(type(error), match=str(error)):
        await Opening(build)
    eventually(lambda: threads() <= before)


@pytest.mark.anyio
async def test_interrupting_open_returns_at_once_and_frees_what_was_built() -> None:
    before = threads()
    built: list[Front] = []
    go_on = threading.Event()

    def build() -> Front:
        assert go_on.wait(60)
        built.append(fake_front())
        return built[0]

    with anyio.move_on_after(0.05) as scope:
        await Opening(build)
    assert scope.cancelled_caught and not built, "it waited for the build"
    go_on.set()
    eventually(lambda: bool(built) and built[0].backend.runner.closed)  # type: ignore[attr-defined]
    eventually(lambda: threads() <= before)


@pytest.mark.anyio
async def test_opening_does_not_block_the_loop() -> None:
    ticked = threading.Event()

    def build() -> Front:
        assert ticked.wait(60), "the loop stood still"
        return fake_front()

    async def tick() -> None:
        for _ in range(10):
            await anyio.sleep(0.001)
        ticked.set()

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        session = await Opening(build)
    await session.aclose()


def test_contexts_are_captured_and_entered_again() -> None:
    jax = pytest.importorskip("jax")
    seen: list[Any] = []

    def build() -> Front:
        seen.append((jax.config.jax_default_matmul_precision, jax.config.jax_default_device))
        return fake_front()

    device = jax.devices()[0]
    with jax.default_matmul_precision("highest"), jax.default_device(device):
        opening = Opening(build)
    session = opening.result_sync()
    assert seen == [("highest", device)]
    assert jax.config.jax_default_matmul_precision is None
    session.close()


def test_a_mesh_is_captured_too() -> None:
    jax = pytest.importorskip("jax")
    seen: list[Any] = []

    def build() -> Front:
        seen.append(jax.sharding.get_mesh())
        return fake_front()

    mesh = jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh):
        opening = Opening(build)
    opening.result_sync().close()
    assert seen == [mesh]


NOT_NEEDED = """
flax orbax statistics
rekindle._src.models.hf_config rekindle._src.models.loading.gguf.header rekindle._src.models.loading.named_tensors
rekindle._src.models.loading.quantized rekindle._src.channels.greeting rekindle._src.processes.facts
rekindle._src.calls.chat_prompt rekindle._src.calls.conversation rekindle._src.session.stats
rekindle._src.calls.tool_functions rekindle._src.structured.spec rekindle._src.structured.token_rules
rekindle._src.text.gguf.reading rekindle._src.text.replies
"""


@pytest.mark.thorough
@pytest.mark.parametrize("size", [pytest.param("small", marks=pytest.mark.slow), "real"])
def test_a_start_that_finds_everything_imports_what_its_first_token_needs(size: str, tmp_path: Path) -> None:
    """And garbage is searched for before and after, but not while it imports."""
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])
    program = """if True:
        import gc, sys, rekindle
        from rekindle._src.models.loading import kept_weights
        if sys.argv[3] == "real":
            kept_weights.MIN_BYTES = 0  # as if it were a real model
        searched = []
        gc.callbacks.append(lambda phase, found: searched.append("jax" in sys.modules))
        opened = rekindle.open_sync
        assert gc.isenabled() and not searched
        with opened(sys.argv[1], cache_dir=sys.argv[2], quiet=True, max_model_len=64) as session:
            print(session.generate_sync([3, 4, 5], max_tokens=4, ignore_eos=True).token_ids)
        print(*sorted(set(sys.argv[4].split()) & set(sys.modules)))
        assert gc.isenabled()
    """
    command = "-c", program, str(folder), str(tmp_path / "cache"), size, NOT_NEEDED
    first, second = (run_python(*command) for _ in range(2))
    assert {"flax", "orbax"} <= {*first.splitlines()[1].split()}
    assert second.splitlines() == [first.splitlines()[0], ""]


def test_jax_is_not_imported_before_a_model_is_opened() -> None:
    """It takes a second, which would pass in the caller's thread, where it can't be shown."""
    program = "import sys, rekindle; rekindle.open('tiny'); print('jax' in sys.modules)"
    assert run_python("-W", "ignore", "-c", program) == "False\n"


@pytest.mark.anyio
async def test_a_notebook_says_once_that_its_cache_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond `disk_memory` and the room for everything else; only files of rekindle's own count."""
    monkeypatch.setattr(opening_module, "LOOK_AFTER", 0.0)
    monkeypatch.setattr(opening_module, "in_notebook", lambda: True)
    config = dataclasses.replace(CONFIG, cache_dir=str(tmp_path), disk_memory=1 << 30)

    async def opened() -> list[str]:
        session = await Opening(lambda: fake_front(config))
        await session.aclose()
        eventually(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))
        return [record.message for record in caplog.records if record.name == "rekindle.cache"]

    def large(path: Path, size: int) -> None:
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)  # takes no room on the disk

    large(tmp_path / "mine" / "film", 9 << 30)
    large(tmp_path / "weights" / "one", 4 << 30)
    assert await opened() == []
    large(tmp_path / "pages" / "two", 3 << 29)
    (said,) = await opened()
    assert f"the cache {tmp_path} has grown to 5.5 GiB, beyond its bound of 5.0 GiB" in said
    assert "rekindle cache prune --to 5GiB" in said
    assert await opened() == [said], "once in a process"
