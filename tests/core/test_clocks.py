"""Clocks that are set a day or a year back or ahead cost time: nothing in use is removed, nothing stays for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.stored_pages import IDENTITY, chain
from rekindle._src.core import atomic_checkpoint
from rekindle._src.core.atomic_checkpoint import PARTIAL, is_stale, write_checkpoint
from rekindle._src.core.shared_cache import FolderPlace, SharedCache
from rekindle._src.core.store import Store
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.tiers.disk import DiskTier

DAY, YEAR = 24 * 3600.0, 365 * 24 * 3600.0
jumps = pytest.mark.parametrize(
    "jump", [-YEAR, -DAY, DAY, YEAR], ids=["year-back", "day-back", "day-ahead", "year-ahead"]
)
REAL = time.time


def set_clock(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Set this process's clock; that of the file system, and so the times of files, stay as they are."""
    monkeypatch.setattr(time, "time", lambda: REAL() + jump)


def tier(folder: Path, budget: int = 1 << 30) -> DiskTier:
    disk = DiskTier(folder, budget, IDENTITY)
    disk.scan()
    return disk


@jumps
def test_pages_are_saved_found_and_make_room(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path)
    for number in range(3):
        disk.write(chain(10 * number, 3))
    snapshot.save(tmp_path, "mine", IDENTITY, [page for page, _ in chain(0, 3)])
    size = disk.statistics().bytes // 3
    set_clock(monkeypatch, jump)
    disk = tier(tmp_path, 3 * size)
    assert len(disk) == 9
    disk.write(chain(40, 3))  # one too many; those before it were used a moment ago, or long before, or in a year
    disk.collect()
    assert len(disk) == 9 and all(page.digest in disk for page, _ in chain(0, 3)), "the snapshot's pages stay"
    snapshot.save(tmp_path, "mine", IDENTITY, [page for page, _ in (*chain(0, 3), *chain(40, 3))])
    assert len(snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")) == 6
    assert {one.name for one in (tmp_path / "pages").iterdir() if one.name.startswith(PARTIAL)} == set()


@pytest.mark.parametrize("jump", [-YEAR, -DAY])
def test_files_used_before_the_clock_was_set_back_go_first(
    jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "cache" / "programs", most=2)
    for name in "abc":
        store.write(name, lambda files: None)
    set_clock(monkeypatch, jump)
    os.utime(store.path("a"), (time.time(), time.time()))  # used since
    store.prune()
    assert store.path("a").is_dir() and len(store.entries()) == 2
    disk = tier(tmp_path)
    for number in range(3):
        disk.write(chain(10 * number, 3))
    paths = sorted((tmp_path / "pages").iterdir())
    os.utime(paths[0], (time.time(), time.time()))
    disk.budget = disk.statistics().bytes - 1
    disk.collect()
    assert paths[0].is_dir() and sum(path.is_dir() for path in paths) == 2


@pytest.mark.parametrize("jump", [-YEAR, -DAY, DAY, YEAR])
def test_leftovers_go_whatever_the_clock_says(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{PARTIAL}left").mkdir()
    assert not is_stale(tmp_path / f"{PARTIAL}left")
    set_clock(monkeypatch, jump)
    assert is_stale(tmp_path / f"{PARTIAL}left")


def test_a_writer_whose_folder_goes_meanwhile_says_so(tmp_path: Path) -> None:
    """As it does where another process takes it for a leftover, because the clock has jumped."""

    def write(folder: Path) -> None:
        (folder / "index").write_bytes(b"content")
        atomic_checkpoint._remove_all(next((tmp_path / "pages").glob(f"{PARTIAL}*")))

    with pytest.raises(OSError):
        write_checkpoint(tmp_path / "pages" / "one", write, durable=True)
    assert not (tmp_path / "pages" / "one").exists()


@pytest.mark.parametrize("jump", [-YEAR, YEAR])
def test_a_machine_whose_clock_is_wrong_empties_no_shared_cache(
    jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedCache(tmp_path / "cache", "a folder", FolderPlace(tmp_path / "shared"), None)
    store = Store(tmp_path / "cache" / "models")
    for name in "ab":
        store.put(name, b"content")
        shared.keep("models", name)
    assert shared.wait(60)
    set_clock(monkeypatch, jump)
    assert shared.prune() == 0 and len(shared.names("models")) == 2


def test_restored_pages_are_not_used_in_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stay for a year, and new ones would leave in their place."""
    from rekindle._src.kvcache import PrefixCache
    from rekindle._src.kvcache.pool import PagePool

    pages = [page._replace(last_use=REAL() + YEAR) for page, _ in chain(0, 3)]
    cache: Any = PrefixCache(PagePool(8), IDENTITY.page_size, IDENTITY.root)
    assert snapshot.graft(cache, pages) == 3
    assert all(node.last_use <= cache.clock() for node in cache)
