"""The memory left to a process, freed memory that goes back to the system, and pauses of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from rekindle._src.core import memory
from rekindle._src.core.memory import gc_paused

MB = 1 << 20


def tell(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    tell(tmp_path, {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8000 << 10} kB", "proc/self/cgroup": "0::/a/b"})
    return tmp_path


def test_without_limits_it_is_the_machines(root: Path) -> None:
    assert memory.available() == 8000 * MB
    tell(root, {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/memory.current": 5})
    assert memory.available() == 8000 * MB


@pytest.mark.parametrize("group", ["", "a/", "a/b/"])
def test_a_group_of_version_2_limits_it_and_files_do_not_count(root: Path, group: str) -> None:
    folder = f"sys/fs/cgroup/{group}"
    stat = f"anon 1\nactive_file {100 * MB}\ninactive_file {200 * MB}"
    tell(root, {f"{folder}memory.max": 2000 * MB, f"{folder}memory.current": 900 * MB, f"{folder}memory.stat": stat})
    assert memory.available() == 1400 * MB


def test_a_group_of_version_1_does_so_too(root: Path) -> None:
    tell(root, {"proc/self/cgroup": "3:cpu:/x\n2:memory:/docker/1"})
    folder = "sys/fs/cgroup/memory/"  # as a container sees it
    stat = f"cache 7\ntotal_active_file 0\ntotal_inactive_file {50 * MB}"
    limits = {"memory.limit_in_bytes": 500 * MB, "memory.usage_in_bytes": 300 * MB, "memory.stat": stat}
    tell(root, {folder + name: value for name, value in limits.items()})
    assert memory.available() == 250 * MB


def test_where_nobody_tells_it_is_unknown(root: Path) -> None:
    (root / "proc/meminfo").unlink()
    assert memory.available() is None


def test_an_accelerators_memory_is_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(*statistics: dict[str, int] | None) -> None:
        fakes = [types.SimpleNamespace(memory_stats=lambda own=own: own) for own in statistics]
        monkeypatch.setattr(jax, "local_devices", lambda: fakes)

    devices({"bytes_limit": 5})
    assert memory.device_available() == memory.available() == 8000 * MB, "CPUs compute in it"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    devices({"bytes_limit": 900 * MB, "bytes_in_use": 200 * MB}, {"bytes_limit": 900 * MB, "bytes_in_use": 300 * MB})
    assert memory.device_available() == 600 * MB, "the fullest one decides"
    devices(None, {})
    assert memory.device_available() is None


BLOCK, COUNT = 60_000, 1_000  # too small for mappings of their own


def resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status")
def test_what_lies_below_a_block_that_is_used_goes_back() -> None:
    if memory.libc_trim() is None:
        pytest.skip("this C library has no malloc_trim")
    memory.give_back()
    blocks = [bytearray(b"x") * BLOCK for _ in range(COUNT)]
    last = blocks[-1]
    before = resident()
    del blocks
    memory.give_back()
    assert before - resident() > BLOCK * COUNT // 2
    assert len(last) == BLOCK


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "libc_trim", lambda: None)
    memory.give_back()


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_freed_inside_goes_back_at_the_end(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    happened: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        happened.append("begun")
        try:
            yield
        finally:
            happened.append("ended")

    monkeypatch.setattr(memory, "give_back", lambda: happened.append("given back"))
    contexts = memory.given_back(context)
    for _ in range(2):
        with contextlib.suppress(KeyError), contexts():
            happened.append("inside")
            if fails:
                raise KeyError
    assert happened == 2 * ["begun", "inside", "ended", "given back"]


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> None:
    """Unfreeze the objects that `tests/conftest.py` froze after other modules."""
    gc.unfreeze()


def test_it_is_off_until_the_last_thread_is_done() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with gc_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with gc_paused():
        thread.start()
        assert inside.wait(10)
        with gc_paused():
            assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_turns_it_on_again() -> None:
    with pytest.raises(ValueError, match="so"), gc_paused():
        raise ValueError("so")
    assert gc.isenabled()


def test_who_turned_it_off_before_finds_it_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("stays", [False, True])
def test_what_stays_is_not_looked_through_next(stays: bool) -> None:
    before = gc.get_threshold()
    gc.set_threshold(1 << 30)
    try:
        with gc_paused(stays=stays):
            made: list[list[object]] = [[]]
        young = {id(one) for one in gc.get_objects(generation=0)}
    finally:
        gc.set_threshold(*before)
    assert (id(made) in young) is not stays


def test_what_stays_does_so_whoever_leaves_last() -> None:
    inside, over = threading.Event(), threading.Event()

    def compiling() -> None:
        with gc_paused():
            inside.set()
            assert over.wait(60)

    before = gc.get_threshold()
    gc.set_threshold(1 << 30)
    try:
        with gc_paused(stays=True):
            thread = threading.Thread(target=compiling)
            thread.start()
            assert inside.wait(60)
            made: list[list[object]] = [[]]
        assert not gc.isenabled()
        over.set()
        thread.join()
        young = {id(one) for one in gc.get_objects(generation=0)}
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled() and id(made) not in young


def test_what_somebody_froze_stays_frozen() -> None:
    kept: list[list[int]] = [[]]
    gc.freeze()
    try:
        with gc_paused(stays=True):
            pass
        assert id(kept) not in map(id, gc.get_objects()), "it is in a generation again"
    finally:
        gc.unfreeze()


def test_in_a_process_of_its_own_what_stays_is_frozen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line froze its imports; those of JAX come later, in another thread."""
    monkeypatch.setattr(memory, "own_process", True)
    gc.freeze()
    try:
        with gc_paused(stays=True):
            made: list[list[int]] = [[]]
        assert id(made) not in map(id, gc.get_objects())
    finally:
        gc.unfreeze()
