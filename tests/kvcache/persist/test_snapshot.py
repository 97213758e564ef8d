"""Snapshots: complete or absent, found again, refused with the reason, and never broken by a kill."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from helpers.python import run_python
from helpers.stored_pages import IDENTITY, chain, same
from rekindle._src.core.atomic_checkpoint import orbax
from rekindle._src.kvcache import CostModel, HostTier, PagePool, PrefixCache, Tiers
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.restoring import likeliest, restore
from rekindle.errors import ConfigError, SnapshotRefused, StoreError


def cache_over(folder: Path) -> tuple[PrefixCache, Tiers]:
    tiers = Tiers(HostTier(1 << 20), CostModel(IDENTITY.page_size), DiskTier(folder, 1 << 20, IDENTITY))
    return PrefixCache(PagePool(8), IDENTITY.page_size, IDENTITY.root, host_tier=tiers), tiers


def save(folder: Path, name: str, length: int) -> None:
    pairs = chain(0, length)
    disk = DiskTier(folder, 1 << 20, IDENTITY)
    disk.scan()
    disk.write(pairs)
    snapshot.save(folder, name, IDENTITY, [page for page, _ in pairs])


def test_a_snapshot_makes_its_pages_known_again(tmp_path: Path) -> None:
    save(tmp_path, "mine", 5)
    branch = chain(50, 2, after=chain(0, 3)[-1][0].digest)
    disk = DiskTier(tmp_path, 1 << 20, IDENTITY)
    disk.write(branch)
    cache, tiers = cache_over(tmp_path)
    assert restore(cache, tiers, "mine") == ("mine", 5, 0)
    cache.check_integrity()
    assert [cache.digest_of(node) for node in cache] == [page.digest for page, _ in chain(0, 5)]
    cache, tiers = cache_over(tmp_path)
    assert restore(cache, tiers, "auto").pages == 7
    assert tiers.disk is not None
    for page, payload in branch:
        assert same(tiers.disk.load(page.digest), payload)
    cache.check_integrity()


def test_the_likeliest_pages_come_first_and_none_before_its_parent() -> None:
    trunk, often, late = (
        [page for page, _ in pairs]
        for pairs in (
            chain(0, 3),
            chain(50, 2, after=chain(0, 3)[-1][0].digest),
            chain(900, 2, after=chain(0, 2)[-1][0].digest),
        )
    )
    often = [page._replace(visits=7) for page in often]
    known = [*late, *trunk, *often]
    named = {page.digest: name for pages, name in ((trunk, "t"), (often, "o"), (late, "l")) for page in pages}
    assert "".join(named[digest] for digest in likeliest(known)) == "tttooll"
    assert "".join(named[digest] for digest in likeliest(known, limit=1)) == "tttoo", "with all that it follows"


def test_saving_again_replaces_it_and_shares_its_pages(tmp_path: Path) -> None:
    for length in (3, 5, 4):
        save(tmp_path, "mine", length)
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    assert len(snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")) == 4
    assert len(DiskTier(tmp_path, 1 << 20, IDENTITY).pages()) == 0
    assert [info.pages for info in snapshot.describe_all(tmp_path, IDENTITY)] == [4]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("fingerprint", "other", "weights"),
        ("kv_dtype", "int8", "pages hold 'float32'"),
        ("page_size", 8, "page size is 4"),
        ("version", 2, "format 1"),
    ],
)
def test_a_snapshot_for_something_else_is_refused_with_the_reason(
    tmp_path: Path, field: str, value: object, reason: str
) -> None:
    save(tmp_path, "mine", 2)
    other = dataclasses.replace(IDENTITY, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(SnapshotRefused, match=reason):
        snapshot.pages_of_snapshot(tmp_path, other, "mine")
    assert snapshot.describe_all(tmp_path, other)[0].refused is not None


def test_a_name_has_a_snapshot_for_each_model_and_configuration(tmp_path: Path) -> None:
    save(tmp_path, "mine", 2)
    others = [dataclasses.replace(IDENTITY, fingerprint="other"), dataclasses.replace(IDENTITY, kv_dtype="int8")]
    for other in others:
        snapshot.save(tmp_path, "mine", other, [])
        snapshot.save(tmp_path, "mine", other, [])
    assert len(list((tmp_path / "snapshots").iterdir())) == 3, "each replaces its own"
    assert len(snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")) == 2
    assert [snapshot.pages_of_snapshot(tmp_path, other, "mine") for other in others] == [[], []]
    save(tmp_path, "mine", 3)
    assert len(snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")) == 3
    assert [info.refused is None for info in snapshot.describe_all(tmp_path, others[0])] == [True, False, False]
    names = [path.name for path in (tmp_path / "snapshots").iterdir()]
    (own,) = [name for name in names if str(snapshot.tag(others[1])) in name]
    assert snapshot.tagged(names, "mine", others[1]) == own
    assert snapshot.delete(tmp_path, "mine")
    assert snapshot.describe_all(tmp_path, IDENTITY) == []


def test_names_are_checked_and_missing_ones_are_listed(tmp_path: Path) -> None:
    save(tmp_path, "mine", 1)
    with pytest.raises(StoreError, match="There are: 'mine'"):
        snapshot.pages_of_snapshot(tmp_path, IDENTITY, "yours")
    for name in ("", "auto", "../mine", "a@b", "a" * 101):
        with pytest.raises(ConfigError):
            snapshot.save(tmp_path, name, IDENTITY, [])


def test_a_damaged_list_falls_back_to_the_version_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "mine", 2)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "remove", lambda path: None)  # as if killed before it removed the older one
        save(tmp_path, "mine", 3)
    (newest,) = (tmp_path / "snapshots").glob("mine@00000002*/rekindle/index")
    newest.write_bytes(newest.read_bytes()[:-1])
    assert len(snapshot.pages_of_snapshot(tmp_path, IDENTITY, "mine")) == 2


def test_pages_of_snapshots_are_collected_last(tmp_path: Path) -> None:
    save(tmp_path, "mine", 4)
    disk = DiskTier(tmp_path, 1 << 20, IDENTITY)
    disk.scan()
    disk.write(chain(100, 4))
    disk.budget = disk.statistics().bytes - 1
    disk.collect()
    assert {page.digest for page in disk.pages()} == {page.digest for page, _ in chain(0, 4)}


PAGES = 3  # more in each save


def write(folder: Path, progress: int) -> None:
    """Serve and save until killed; says how far it got."""
    disk = DiskTier(folder, 1 << 20, IDENTITY)
    disk.scan()
    length = 0
    while True:
        length += PAGES
        pairs = chain(0, length)
        disk.write(pairs)
        snapshot.save(folder, "mine", IDENTITY, [page for page, _ in pairs])
        disk.collect()
        os.write(progress, length.to_bytes(4, "little"))


def look(folder: Path, saved: int) -> None:
    """What the writer said that it had saved is there, or newer, and every byte is right."""
    disk = DiskTier(folder, 1 << 20, IDENTITY)
    disk.scan()
    assert disk.damaged == 0, "a broken segment"
    try:
        pages = snapshot.pages_of_snapshot(folder, IDENTITY, "mine")
    except Exception:
        assert not saved, "the snapshot is gone"
        return
    assert len(pages) >= saved, f"{len(pages)} pages are listed, {saved} had been saved"
    assert len(pages) % PAGES == 0, "half a snapshot"
    payloads = {page.digest: payload for page, payload in chain(0, len(pages))}
    for page in pages:
        assert same(disk.load(page.digest), payloads[page.digest])


def kill_writers(folder: Path, times: int) -> None:
    """Fork a writer again and again, kill it at a random moment, and look at what it left."""
    orbax()  # imported once, before forking
    draw = random.Random(times)
    for turn in range(times):
        place = folder / str(turn)
        place.mkdir()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            write(place, writing)
        os.close(writing)
        time.sleep(draw.uniform(0.0, 0.8))  # up to thirty saves
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reading, "rb") as file:
            said = file.read()
        saved = int.from_bytes(said[-4:], "little")
        look(place, saved)
        print(f"killed after {saved} pages")


def killed(folder: Path, times: int) -> None:
    run_python(__file__, str(folder), str(times), timeout=500)


@pytest.mark.thorough
def test_a_kill_while_saving_leaves_a_complete_state(tmp_path: Path) -> None:
    killed(tmp_path, 5)


@pytest.mark.slow
def test_fifty_kills_while_saving_leave_a_complete_state(tmp_path: Path) -> None:
    killed(tmp_path, 50)


if __name__ == "__main__":
    kill_writers(Path(sys.argv[1]), int(sys.argv[2]))


def test_restoring_a_snapshot_is_a_use(tmp_path: Path) -> None:
    """It was the oldest of the cache, however often it was restored."""
    for name in ("mine", "other"):
        save(tmp_path, name, 2)
    other = dataclasses.replace(IDENTITY, fingerprint="other")
    snapshot.save(tmp_path, "mine", other, [])
    for path in (tmp_path / "snapshots").iterdir():
        os.utime(path, (1e9, 1e9))
    restore(*cache_over(tmp_path), "mine")
    used = [path for path in (tmp_path / "snapshots").iterdir() if path.stat().st_mtime > 1e9]
    assert used == [snapshot.find(tmp_path, "mine", IDENTITY).path]
