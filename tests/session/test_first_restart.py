"""The very first restart after the very first save finds all that its first request needs, and compiles nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from helpers.python import run_python
from helpers.sessions import eventually
from helpers.small import opening, plain, prompt
from rekindle._src.execution.runner import Runner
from rekindle._src.kvcache import writer as cache_writer
from rekindle._src.kvcache.tiers import restoring
from rekindle._src.programs import layered, warming
from rekindle._src.programs.recipes import Recipes

SCRIPT = """
import json, sys, time
from pathlib import Path
from helpers.counting import compiled_by_jax, counts
from helpers.tiered import opened, prompt
mode, folder, role, saving = sys.argv[1:]
# Chunks of 64: the first process computes the prompt by the larger program alone, and what restores pages is not used.
options = {"precompile": mode, "max_tokens_per_step": 64, "device_pages": 40}
ids = [token for index in range(2) for token in prompt(index)][:118]
with compiled_by_jax() as events, opened(Path(folder), restore="auto" if role == "second" else None, **options) as s:
    done = s.generate_sync(ids, max_tokens=2, ignore_eos=True)
    report = {"compiled": counts(s), "events": len(events), "cached": done.usage.cached_tokens, "ids": done.token_ids,
              "waited": done.timings.compiling,
              "programs": {program.name: program.origin for program in s.programs()}}
    if role == "first" and saving == "save":
        s.save("mine").result_sync()
    elif role == "first":
        stored = Path(folder) / "programs"
        names = lambda: {json.loads(one.read_text())["name"] for one in stored.glob("*/rekindle/meta.json")}
        while s.cache.stats().disk.pages < 14 or not {"scatter", "r2t32"} <= names():
            time.sleep(0.1)
print(json.dumps(report))
"""


def run(mode: str, folder: Path, role: str, saving: str) -> dict[str, Any]:
    printed = run_python("-c", SCRIPT, mode, str(folder), role, saving)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("mode", "saving"),
    [
        pytest.param("lazy", "save", marks=pytest.mark.thorough),  # by default: lesson 26
        pytest.param("lazy", "background", marks=pytest.mark.slow),
        pytest.param("all", "save", marks=pytest.mark.slow),
        pytest.param("background", "save", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_for_the_first_restored_prompt(mode: str, saving: str, tmp_path: Path) -> None:
    first = run(mode, tmp_path, "first", saving)
    second = run(mode, tmp_path, "second", saving)
    assert (first["cached"], second["cached"]) == (0, 112)
    assert second["ids"] == first["ids"]
    needed = {"scatter", "r2t32", "memory"}
    assert {name: second["programs"].get(name) for name in needed} == dict.fromkeys(needed, "loaded")
    assert second["waited"] == 0.0, "what it needs was there when the session was open"
    if (mode, saving) == ("lazy", "save"):
        assert not {"scatter", "r2t32"} & {*first["programs"]}, "this would be no test"
    if mode != "background":  # there the others compile meanwhile
        assert (second["compiled"], second["events"]) == ([0, 0], 0)


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_process_that_may_end_soon_prepares_a_restart_only_when_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts serve it, and would serve the next one: nothing else is compiled until a save asks for it."""
    monkeypatch.setattr(warming, "build_kernels", lambda names: None)
    monkeypatch.setattr(warming, "seconds_of_parts", lambda *_: 60.0)
    monkeypatch.setattr(layered, "MANY_LAYERS", 2)
    monkeypatch.setattr(layered, "ALIKE", 1)
    monkeypatch.setattr(Recipes, "kernels", lambda self: ["some"])
    monkeypatch.setattr(cache_writer, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(cache_writer, "COLD_SECONDS", 0.0)
    looked: list[bool] = []
    thrice = threading.Event()
    prepare = cache_writer.CacheWriter.store_for_restart

    def noticed(self: cache_writer.CacheWriter, *, all_of_them: bool = False) -> None:
        prepare(self, all_of_them=all_of_them)
        looked.append(all_of_them)
        if len(looked) == 3:
            thrice.set()

    def stored() -> set[str]:
        return {json.loads(one.read_text())["name"] for one in tmp_path.glob("programs/*/rekindle/meta.json")}

    monkeypatch.setattr(cache_writer.CacheWriter, "store_for_restart", noticed)
    async with opening(precompile="lazy", cache_dir=tmp_path, disk_memory=1 << 28) as session:
        await session.generate(prompt(0, 40), max_tokens=4, ignore_eos=True)
        assert await anyio.to_thread.run_sync(thrice.wait, 60)
        assert "scatter" not in stored() | {program.name for program in session.programs()}
        before = session.stats().compilations
        await session.save("mine")
        assert session.stats().compilations > before
    assert {"scatter", "r2t32"} <= stored() and looked[:3] == [False] * 3 and looked[-1]


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize(
    "mode", ["lazy", pytest.param("background", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_restored_pages_are_on_the_device_when_the_session_is_open(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they had been read by then; what its first request needs has run once, and changed nothing."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "disk_memory": 1 << 28}
    async with opening(**options) as session:
        await session.generate(prompt(0, 44), max_tokens=8, ignore_eos=True)
        await session.save("mine")
    rehearse, ready = Runner.rehearse, []

    def patiently(self: Runner, keys: Any) -> bool:
        tiers: Any = self.host_tier
        while len(tiers.host) < 6:
            ended.wait(0.01)
        ready.extend(key.name for key in keys)
        return rehearse(self, keys)

    ended = threading.Event()
    monkeypatch.setattr(Runner, "rehearse", patiently)
    monkeypatch.setattr(restoring, "MIN_BYTES", 0)
    async with opening(**options, precompile=mode, restore="mine") as session:
        assert session.cache.stats().device_pages == 6
        done = await session.generate(prompt(0, 44), max_tokens=8, ignore_eos=True)
        assert done.token_ids == plain(prompt(0, 44), 8) and done.usage.cached_tokens == 40
        assert session.stats().cache.host_hit_pages == 0 and session.stats().compilations == 0
        assert (await session.generate(prompt(1, 30), max_tokens=8)).token_ids == plain(prompt(1, 30), 8)
        session.check_integrity()
    assert {"scatter", "r2t32"} < {*ready}


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_where_what_was_expected_fails_nothing_is_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"cache_dir": tmp_path, "disk_memory": 1 << 28}
    async with opening(**options) as session:
        await session.generate(prompt(0, 44), max_tokens=8, ignore_eos=True)
        await session.save("mine")

    def fails(self: Runner, keys: Any) -> bool:
        raise MemoryError("no room for a step")

    monkeypatch.setattr(Runner, "rehearse", fails)
    before = {*threading.enumerate()}
    with pytest.raises(MemoryError, match="no room"):
        await opening(**options, restore="mine")
    await anyio.to_thread.run_sync(lambda: eventually(lambda: not readers(before)))


def readers(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread for thread in threading.enumerate() if thread.name.startswith("rekindle pages") and thread not in before
    ]
