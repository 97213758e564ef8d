"""The disk tier: what is written is read back as it was, or is reported once and forgotten."""

from __future__ import annotations

import dataclasses
import logging
import random
from pathlib import Path

import pytest

from helpers.stored_pages import IDENTITY, Pair, chain, same
from rekindle._src.kvcache.tiers.disk import MANY, DiskTier
from rekindle.errors import StoreError


def tier(folder: Path, budget: int = 1 << 20) -> DiskTier:
    return DiskTier(folder, budget, IDENTITY)


def reopened(folder: Path) -> DiskTier:
    found = tier(folder)
    found.scan()
    return found


def check(disk: DiskTier, pairs: list[Pair]) -> int:
    """How many of the pages are there; each of them has to be right."""
    good = 0
    for page, payload in pairs:
        try:
            assert same(disk.load(page.digest), payload)
        except (KeyError, StoreError):
            assert page.digest not in disk
        else:
            good += 1
    return good


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    pairs = chain(0, 5)
    assert tier(tmp_path).write(pairs) == 5
    found = reopened(tmp_path)
    assert check(found, pairs) == 5
    assert [page.digest for page in found.pages()] == [page.digest for page, _ in pairs]
    assert [page.tokens.tolist() for page in found.pages()] == [page.tokens.tolist() for page, _ in pairs]


def test_only_what_is_new_is_written(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    assert disk.write(chain(0, 3)) == 3
    assert disk.write(chain(0, 3)) == 0
    assert disk.write(chain(0, 5)) == 2
    assert len(list((tmp_path / "pages").iterdir())) == 2


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    one.write(chain(0, 3))
    two.scan()
    assert two.write(chain(0, 4)) == 1
    one.collect()
    one.scan()
    assert check(one, chain(0, 4)) == check(two, chain(0, 4)) == 4


def test_pages_of_another_model_are_not_seen(tmp_path: Path) -> None:
    tier(tmp_path).write(chain(0, 3))
    other = DiskTier(tmp_path, 1 << 20, dataclasses.replace(IDENTITY, fingerprint="others"))
    assert other.scan() == 0
    assert other.other_models() == {IDENTITY.root.hex()}


def test_a_page_that_another_process_removed_is_forgotten(tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    one.write(chain(0, 3))
    two.scan()
    one.clear()
    with pytest.raises(KeyError):
        two.load(chain(0, 1)[0][0].digest)
    assert len(two) == 0


def test_the_budget_holds_and_the_least_recently_used_go(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    disk.write(chain(0, 4))
    disk.budget = 4 * disk.statistics().bytes
    for start in range(100, 1000, 100):
        if disk.room(304) >= 304:
            disk.write(chain(start, 4))
    assert check(disk, chain(0, 4)) == 4, "what is fresh makes no room"
    disk.fresh_seconds = 0.0
    for start in range(100, 1000, 100):
        size = 4 * 76
        if disk.room(size) >= size:
            disk.write(chain(start, 4))
    assert disk.statistics().bytes <= disk.budget
    assert check(disk, chain(0, 4)) == 0
    assert check(disk, chain(900, 4)) == 4


def test_many_small_segments_are_merged(tmp_path: Path) -> None:
    disk = tier(tmp_path, 1 << 30)
    for start in range(MANY):
        disk.write(chain(10 * start, 1))
    disk.collect()
    assert disk.statistics().segments == 1
    every = [pair for start in range(MANY) for pair in chain(10 * start, 1)]
    assert check(disk, every) == check(reopened(tmp_path), every) == MANY


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damage_is_found_wherever_it_is(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    pairs = chain(0, 4)
    tier(tmp_path).write(pairs)
    files = [file for file in (tmp_path / "pages").rglob("*") if file.is_file()]
    originals = {file: file.read_bytes() for file in files}
    draw = random.Random(0)
    seen = 0
    for _ in range(100):
        file = draw.choice([file for file in files if originals[file]])
        at = draw.randrange(len(originals[file]))
        data = bytearray(originals[file])
        if damage == "flip":
            data[at] ^= 1 << draw.randrange(8)
        else:
            del data[at:]
        file.write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rekindle.cache"):
            disk = reopened(tmp_path)
            for _ in range(2):
                good = check(disk, pairs)
        matters = file.name in ("pages", "index")
        assert good == 4 or matters
        assert good < 4 or not matters
        assert len(caplog.records) == (good < 4), "reported once"
        assert disk.damaged >= (good < 4)
        seen += good < 4
        for path, content in originals.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    assert seen > 10


def test_a_damaged_page_is_written_again(tmp_path: Path) -> None:
    pairs = chain(0, 2)
    tier(tmp_path).write(pairs)
    (file,) = (tmp_path / "pages").rglob("pages")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    disk = reopened(tmp_path)
    assert check(disk, pairs) == 1
    assert disk.write(pairs) == 1
    assert check(disk, pairs) == check(reopened(tmp_path), pairs) == 2


def test_a_full_disk_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(StoreError, match=r"they need twice that, and 0\.0 MiB are free in "):
        disk.write(chain(0, 3))
    assert not list((tmp_path / "pages").iterdir())
