"""Files used where they are mapped, and moved to huge pages while they are read."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from rekindle._src.models.loading import mmap_weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere files stay where they are mapped")
SIZE = (11 << 20) + 1234  # several pieces, the last of which ends amid a page


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes())
    return path


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap_weights, "PIECE", 2 << 20)
    monkeypatch.setattr(mmap_weights, "DELAY", 0.0)
    monkeypatch.setattr(mmap_weights, "worthwhile", lambda size: True)


def maps(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def ended(mover: threading.Thread | None) -> None:
    assert mover is not None
    mover.join(60)
    assert not mover.is_alive()


def test_a_view_is_the_file_and_can_not_be_written(file: Path) -> None:
    content = mmap_weights.view(file)
    assert maps(file)
    assert content.tobytes() == file.read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        content[0] = 1


def test_a_device_adopts_it_and_keeps_it_when_the_file_is_gone(file: Path) -> None:
    content = mmap_weights.view(file)
    here = content[64 : 64 + (1 << 20)]
    adopted, wanted = jax.device_put(here, may_alias=True), here.tobytes()
    assert adopted.unsafe_buffer_pointer() == here.ctypes.data
    file.unlink()
    del content, here
    gc.collect()
    assert np.asarray(adopted).tobytes() == wanted
    adopted.delete()
    del adopted
    gc.collect()
    assert not maps(file)


def test_whoever_reads_it_does_not_notice_that_it_moves(file: Path) -> None:
    content, wrong, moved = mmap_weights.view(file), list[int](), threading.Event()
    wanted = np.frombuffer(file.read_bytes(), np.uint8)

    def read() -> None:
        while not moved.is_set():
            wrong.extend(np.flatnonzero(content != wanted)[:1])

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    ended(mmap_weights.move_later(content))
    moved.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert not maps(file)
    np.testing.assert_array_equal(content, wanted)


def test_a_part_is_enough_to_have_it_moved(file: Path) -> None:
    content = mmap_weights.view(file)
    part, wanted = content[100:200].view(np.int32), content[100:200].tobytes()
    mover = mmap_weights.move_later(content)
    del content
    ended(mover)
    assert not maps(file)
    assert part.tobytes() == wanted


def test_what_is_not_used_any_more_is_not_moved(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap_weights, "DELAY", 0.3)
    content = mmap_weights.view(file)
    mover = mmap_weights.move_later(content)
    called = list[str]()
    monkeypatch.setattr(mmap_weights, "libc", lambda: called.append("mremap"))
    del content
    gc.collect()
    assert not maps(file)
    ended(mover)
    assert not called


def stays(file: Path) -> None:
    """Where the file is mapped, in part at least, with its content."""
    content = mmap_weights.view(file)
    ended(mmap_weights.move_later(content))
    assert maps(file)
    assert content.tobytes() == file.read_bytes()


def test_an_old_system_leaves_it_where_it_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap_weights, "INTO_PLACE", 1 | 2 | 64)  # a flag that none knows
    stays(file)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """One on which moving is of use."""
    monkeypatch.undo()
    files = {"KINDS": "always [madvise] never", "OVERCOMMIT": "0"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(mmap_weights, name, tmp_path / name)
    monkeypatch.setattr(mmap_weights, "available", lambda: 2 * SIZE)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {name: tmp_path / name for name in files}


def test_it_is_worth_moving(system: dict[str, Path]) -> None:
    assert mmap_weights.worthwhile(SIZE)


def test_weights_are_not_moved_without_huge_pages_or_memory(
    system: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, other in (("KINDS", "always madvise [never]"), ("OVERCOMMIT", "2")):
        before = system[name].read_text()
        system[name].write_text(other)
        assert not mmap_weights.worthwhile(SIZE)
        system[name].write_text(before)
    for room in (SIZE, None):
        with monkeypatch.context() as short:
            short.setattr(mmap_weights, "available", lambda room=room: room)
            assert not mmap_weights.worthwhile(SIZE)
    free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    for limited in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        with monkeypatch.context() as beneath:
            most = {limited: (1 << 40, 1 << 40)}
            beneath.setattr(resource, "getrlimit", lambda kind, most=most: most.get(kind, free))
            assert not mmap_weights.worthwhile(SIZE)


def test_a_limit_that_comes_meanwhile_stops_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter((True, True, True, False))
    monkeypatch.setattr(mmap_weights, "worthwhile", lambda size: next(left))
    stays(file)


def test_only_files_of_this_machine_are_mapped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mmap_weights.file_system(file) in mmap_weights.LOCAL
    monkeypatch.setattr(mmap_weights, "LOCAL", {"nfs"})
    with pytest.raises(OSError, match="could go"):
        mmap_weights.view(file)


def test_a_file_cut_under_its_mapping_is_an_error_and_not_the_end(file: Path) -> None:
    content = mmap_weights.view(file)
    mmap_weights.bring(content)
    os.truncate(file, 4096)
    with pytest.raises(OSError, match="Bad address"):
        mmap_weights.bring(content[1 << 20 : 2 << 20])
