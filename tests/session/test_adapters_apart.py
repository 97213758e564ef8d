"""Adapters are read apart from all else: saves, exports, later loads and streams don't wait for a hostile one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import rekindle
from helpers import adapters, turns
from helpers.sessions import eventually
from helpers.small import MODEL, OPTIONS, plain, prompt
from rekindle._src.capabilities.adapters import owner as shelf
from rekindle._src.models.adapters import budget
from rekindle.errors import CheckpointError, SessionClosed

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]
STEPS = 1 << 22


def opening(**changes: Any) -> Any:
    return rekindle.open(MODEL, **{**OPTIONS, "precompile": "lazy", "max_adapters": 2, "max_adapter_rank": 8} | changes)


def hostile(folder: Path) -> Path:
    """A folder whose expressions take as many steps as an adapter may cost."""
    adapters.write(folder, MODEL.config, targets=("q_proj", "down_proj"))
    path = folder / "adapter_config.json"
    repeats = {f"(?:{number}?{'.?' * 1900}){{255}}": 4 for number in range(200)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rank_pattern": repeats}))
    return folder


class Gate:
    """Reading an adapter called "slow" lasts until it is opened, or not waited for any longer."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read
        self.opened, self.entered, self.left = threading.Event(), threading.Event(), threading.Event()

    def read_adapter(self, source: Any, name: str, *arguments: Any, budget: Any, **options: Any) -> Any:
        if name == "slow":
            self.entered.set()
            try:
                while not self.opened.wait(0.001):
                    budget.check()
            finally:
                self.left.set()
        return self._read(source, name, *arguments, budget=budget, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(shelf.read_adapter)
    monkeypatch.setattr(shelf, "read_adapter", gate.read_adapter)
    yield gate
    gate.opened.set()


async def test_saves_exports_and_later_loads_do_not_wait(gate: Gate, tmp_path: Path) -> None:
    folder = adapters.write(tmp_path / "a", MODEL.config)
    async with opening(cache_dir=tmp_path / "cache", disk_memory="64MiB") as session:
        ids = prompt(1, 30)
        await session.generate(ids, max_tokens=2)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: awaited(session.load_adapter("slow", folder)))
            await anyio.to_thread.run_sync(gate.entered.wait)
            await session.load_adapter("quick", folder)
            await session.save_adapter("quick", tmp_path / "kept")
            assert (await session.save("mine")).pages > 0
            await session.cache.export_prefix(ids, tmp_path / "prefix")
            assert session.adapters == ("quick",)
            gate.opened.set()
        assert session.adapters == ("quick", "slow")


async def awaited(call: Any) -> None:
    await call


async def test_reading_ends_when_the_caller_has_left(gate: Gate, tmp_path: Path) -> None:
    folder = adapters.write(tmp_path / "a", MODEL.config)
    async with opening() as session:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: awaited(session.load_adapter("slow", folder)))
            await anyio.to_thread.run_sync(gate.entered.wait)
            group.cancel_scope.cancel()
        await anyio.to_thread.run_sync(lambda: eventually(gate.left.is_set))
        assert not gate.opened.is_set() and session.adapters == ()


async def test_a_disk_that_hangs_ends_in_an_error(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "SECONDS", 0.05)
    async with opening() as session:
        with pytest.raises(CheckpointError, match=r"The adapter 'slow' was not read within 0\.05 s"):
            await session.load_adapter("slow", adapters.write(tmp_path / "a", MODEL.config))


async def test_what_a_disk_refuses_is_an_error_of_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    async with opening() as session:
        monkeypatch.setattr(shelf, "read_adapter", failing)
        with pytest.raises(CheckpointError, match=r"The adapter 'x' can't be read now: \[Errno 5\] Input/output error"):
            await session.load_adapter("x", tmp_path)


async def test_a_session_that_is_closed_meanwhile_says_so_and_ends_the_reading_thread(
    gate: Gate, tmp_path: Path
) -> None:
    folder, errors = adapters.write(tmp_path / "a", MODEL.config), list[BaseException]()
    session = await opening()

    async def load() -> None:
        try:
            await session.load_adapter("slow", folder)
        except SessionClosed as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(load)
        await anyio.to_thread.run_sync(gate.entered.wait)
        await session.aclose()
        left = await anyio.to_thread.run_sync(gate.left.wait, 30)
        gate.opened.set()
    assert left and len(errors) == 1


@pytest.mark.parametrize("steps", [1 << 17, pytest.param(STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_neighbour_never_waits_long_for_hostile_adapters(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """A stream fell from 836 to 41 pieces a second, for hours."""
    monkeypatch.setattr(budget, "MAX_STEPS", steps)
    folders = [hostile(tmp_path / str(number)) for number in range(2)]
    refused, loaded = list[CheckpointError](), anyio.Event()
    async with opening() as session:
        await session.generate(prompt(1, 9), max_tokens=8, ignore_eos=True)  # compiled

        async def attack(folder: Path) -> None:
            with pytest.raises(CheckpointError, match=r"more than .* steps") as caught:
                await session.load_adapter("x", folder)
            refused.append(caught.value)

        async def attack_all() -> None:
            async with anyio.create_task_group() as group:
                for folder in folders:
                    group.start_soon(attack, folder)
            loaded.set()

        with turns.neighbour() as neighbour:
            async with anyio.create_task_group() as group:
                group.start_soon(attack_all)
                while not loaded.is_set():
                    done = await session.generate(prompt(1, 9), max_tokens=8, ignore_eos=True)
                    assert list(done.token_ids) == list(plain(prompt(1, 9), 8))
        assert len(refused) == len(folders)
    record_property("longest_turn", neighbour.longest)
    record_property("grown", neighbour.grown)
    assert neighbour.longest <= turns.MOST, f"a neighbour waited for {neighbour.longest:.3f} s of processors"
