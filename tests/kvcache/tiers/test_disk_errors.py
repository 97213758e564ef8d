"""A passing error, or somebody else's folder, costs computing and never a page that was kept."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from helpers.faults import NAMES, PASSING, unreadable
from helpers.stored_pages import IDENTITY, chain
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.tiers.disk import MANY, DiskTier
from rekindle.errors import StoreError
from rekindle_kernels.private_files import tell_once

passing = pytest.mark.parametrize("number", PASSING, ids=NAMES)


def tier(folder: Path) -> DiskTier:
    return DiskTier(folder, 1 << 30, IDENTITY)


def known(folder: Path) -> int:
    disk = tier(folder)
    disk.scan()
    return sum(disk.load(page.digest) is not None for page in disk.pages())


@passing
def test_a_scan_that_fails_removes_nothing(tmp_path: Path, number: int) -> None:
    tier(tmp_path).write(chain(0, 4))
    disk = tier(tmp_path)
    with unreadable("index", number) as tried:
        assert disk.scan() == 0
    assert tried and disk.damaged == 0
    assert disk.scan() == 4, "it is read when the error has passed"
    assert known(tmp_path) == 4


@passing
def test_a_read_that_fails_forgets_nothing(tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture) -> None:
    disk = tier(tmp_path)
    disk.write(chain(0, 4))
    digest = chain(0, 4)[2][0].digest
    with unreadable("pages", number), caplog.at_level(logging.WARNING, "rekindle.cache"):
        for _ in range(2):
            with pytest.raises(StoreError, match="can't be read now"):
                disk.load(digest)
    assert len(caplog.records) == 1, "said once"
    assert disk.damaged == 0
    assert disk.load(digest)
    assert known(tmp_path) == 4


def test_a_segment_that_fails_again_and_again_is_asked_no_more(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    disk.write(chain(0, 4))
    with unreadable("pages", PASSING[1]):
        for page, _ in chain(0, 3):
            with pytest.raises(StoreError):
                disk.load(page.digest)
    assert len(disk) == 0 and disk.scan() == 0
    assert known(tmp_path) == 4


@passing
def test_merging_does_not_remove_what_it_could_not_read(tmp_path: Path, number: int) -> None:
    disk = tier(tmp_path)
    for start in range(MANY):
        disk.write(chain(10 * start, 1))
    (some, *_) = sorted((tmp_path / "pages").iterdir())
    with unreadable(some.name, number):
        disk.collect()
    assert known(tmp_path) == MANY


@passing
def test_pages_of_a_snapshot_stay_while_its_list_can_not_be_read(tmp_path: Path, number: int) -> None:
    disk = tier(tmp_path)
    disk.write(chain(0, 4))
    snapshot.save(tmp_path, "mine", IDENTITY, [page for page, _ in chain(0, 4)])
    disk.budget, disk.fresh_seconds = 1, 0.0
    with unreadable("snapshots", number):
        disk.collect()
        with pytest.raises(StoreError, match="can't be read now"):
            snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")
    assert known(tmp_path) == 4
    assert len(snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")) == 4


def test_in_a_folder_that_others_can_write_nothing_is_read_or_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier(tmp_path).write(chain(0, 4))
    tell_once.cache_clear()
    (tmp_path / "pages").chmod(0o777)
    before = sorted(path.name for path in (tmp_path / "pages").iterdir())
    with caplog.at_level(logging.WARNING, "rekindle.cache"):
        disk = tier(tmp_path)
        assert disk.scan() == disk.collect() == disk.clear() == 0
    assert len(caplog.records) == 1 and "chmod" in caplog.text
    with pytest.raises(StoreError, match="can be written by others"):
        disk.write(chain(10, 1))
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == before
    (tmp_path / "pages").chmod(0o700)
    assert known(tmp_path) == 4


def test_only_this_user_reads_what_was_kept(tmp_path: Path) -> None:
    """Indexes hold prompts, and everybody could read them."""
    disk = tier(tmp_path / "cache")
    disk.write(chain(0, 4))
    snapshot.save(tmp_path / "cache", "mine", IDENTITY, [page for page, _ in chain(0, 4)])
    disk.collect()
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert os.path.exists(tmp_path / "cache" / ".pages.lock")


@passing
def test_a_folder_that_can_not_be_listed_now_costs_nothing(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tier(tmp_path)
    disk.write(chain(0, 4))

    def failing(path: object = ".") -> object:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing)
        disk.collect()
    assert disk.collect() > 0
    assert known(tmp_path) == 4
