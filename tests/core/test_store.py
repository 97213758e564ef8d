"""One set of rules for all kinds of cache entries: trust, damage, room, and the shared cache that backs them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import NAMES, PASSING
from rekindle._src.core.atomic_checkpoint import DAMAGED, ITEM, PARTIAL
from rekindle._src.core.store import Entry, Sound, Store, Unusable
from rekindle_kernels import read_through
from rekindle_kernels.private_files import tell_once


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tell_once.cache_clear()
    return tmp_path / "cache" / "weights"


def write(store: Store, name: str, text: str = "content", used: float | None = None) -> None:
    def fill(files: Path) -> None:
        (files / "file").write_text(text)

    store.write(name, fill)
    if used is not None:
        os.utime(store.path(name), (used, used))


def text_of(path: Path) -> str:
    return (path / ITEM / "file").read_text()


def failing(error: Exception) -> Any:
    def reader(path: Path) -> None:
        raise error

    return reader


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_and_folders_come_back(folder: Path) -> None:
    store = Store(folder)
    assert store.get("a") is None and not store.holds("b")
    assert store.put("a", b"bytes") and store.get("a") == b"bytes"
    write(store, "b")
    assert store.holds("b") and store.read("b", text_of) == "content"
    assert store.content("b", f"{ITEM}/file") == b"content"
    store.remove("a")
    store.remove("b")
    assert names(folder) == set()


def test_nothing_is_read_or_written_where_others_can_write(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Store(folder)
    assert before.put("a", b"bytes")
    write(before, "b")
    folder.chmod(0o777)
    for _ in range(2):
        store = Store(folder)
        assert store.distrusted and store.get("a") is None and not store.put("c", b"") and not store.holds("b")
    assert names(folder) == {"a", "b"} and caplog.text.count("the cache is not used") == 1


@pytest.mark.parametrize("number", PASSING, ids=NAMES)
def test_an_error_that_passes_leaves_the_entry(folder: Path, number: int) -> None:
    store = Store(folder)
    write(store, "a")
    with pytest.raises(Unusable) as caught:
        store.read("a", failing(OSError(number, os.strerror(number))))
    assert caught.value.passing and store.read("a", text_of) == "content"


def test_damage_is_set_aside_and_only_so_much_of_it_is_kept(folder: Path) -> None:
    store = Store(folder, kept_damaged=1)
    for _ in range(3):
        write(store, "a")
        with pytest.raises(Unusable, match="ValueError: cut off"):
            store.read("a", failing(ValueError("cut off")))
        assert not store.holds("a")
    assert len(names(folder)) == 1 and all(name.startswith(DAMAGED) for name in names(folder))


def test_what_is_sound_stays_and_errors_of_others_pass(folder: Path) -> None:
    store = Store(folder)
    write(store, "a")
    with pytest.raises(Sound):
        store.read("a", failing(Sound("for other devices")))
    with pytest.raises(RuntimeError, match="out of memory"):
        store.read("a", failing(RuntimeError("out of memory")), (ValueError,))
    assert store.holds("a")


@pytest.mark.parametrize("bound", ["most", "max_bytes", "max_age"])
def test_the_least_recently_used_leave_first(folder: Path, bound: str) -> None:
    store = Store(folder, max_bytes=1 << 40)
    for used, name in enumerate("abc"):
        write(store, name, used=1e8 + used)
    size = store.entries()[0].size
    bounds: dict[str, Any] = {"most": 2, "max_bytes": 2 * size, "max_age": 1e9}
    store = Store(folder, **{bound: bounds[bound]})
    now = os.stat(folder).st_mtime
    for name in "ab":  # used again; c was not
        store.read(name, text_of)
    (folder / f"{PARTIAL}old").mkdir()
    (folder / f"{PARTIAL}new").mkdir()
    os.utime(folder / f"{PARTIAL}old", (now - 1e6, now - 1e6))
    store.prune()
    assert names(folder) == {"a", "b", f"{PARTIAL}new"}
    if bound == "most":
        os.utime(store.path("a"), (1e8, 1e8))
        store.prune(room=1)
        assert names(folder) == {"b", f"{PARTIAL}new"}


def test_many_writes_look_through_the_folder_a_few_times(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, entries = list[int](), Store.entries

    def counted(self: Store) -> list[Entry]:
        looks.append(1)
        return entries(self)

    monkeypatch.setattr(Store, "entries", counted)
    for number in range(70):
        store = Store(folder, most=64)  # as each session makes one
        write(store, str(number), used=1e8 + number)
        store.prune_after(7)
        assert len(names(folder)) <= 64
        assert len(looks) <= 8 or number >= 64
    assert names(folder) == {str(number) for number in range(6, 70)}


def test_files_are_bounded_by_their_bytes(folder: Path) -> None:
    """Those of earlier processes count, too, and the least recently used leave first."""
    for index in range(20):
        Store(folder).put(f"old {index}", bytes(1000))
        os.utime(folder / f"old {index}", (1e8 + index, 1e8 + index))
    store = Store(folder, max_bytes=8_000)
    assert store.get("old 15") is not None
    for index in range(40):
        assert store.put(f"new {index % 5}", bytes(1000))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000 * 17 / 16
    assert names(folder) == {*(f"new {index}" for index in range(5)), "old 15", "old 19", "old 18"}


def test_a_topic_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(folder)
    for topic in ("write", "read", "write"):
        store.warn_once(topic, f"{topic} failed")
    assert [record.getMessage() for record in caplog.records] == ["write failed", "read failed"]


def test_an_entry_that_another_process_wrote_meanwhile_is_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(path: Path, fill: Any) -> None:
        if path.name == "a":
            (path / ITEM).mkdir(parents=True)
        raise OSError("it is there")

    monkeypatch.setattr("rekindle._src.core.store.write_checkpoint", too_late)
    Store(folder).write("a", lambda files: None)
    with pytest.raises(OSError, match="it is there"):
        Store(folder).write("b", lambda files: None)


def test_missing_entries_come_from_behind_and_used_ones_go_there(folder: Path) -> None:
    class Behind:
        def __init__(self) -> None:
            self.kept: list[tuple[str, str]] = []

        def fetch(self, kind: str, name: str) -> bool:
            if name == "b":
                write(Store(folder), name, "from behind")
            return name == "b"

        def keep(self, kind: str, name: str) -> None:
            self.kept.append((kind, name))

        def names(self, kind: str) -> list[str]:
            return []

    behind = Behind()
    store = Store(folder)
    folder.mkdir(parents=True)
    read_through.attach(folder.parent, behind)
    try:
        assert not store.holds("a") and store.holds("b")
        behind.kept.clear()
        assert store.read("b", text_of) == "from behind" and behind.kept == [("weights", "b")]
    finally:
        read_through.attach(folder.parent, None)


def test_use_touches_an_entry_and_a_folder_that_is_read_only_is_used_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of stores without a bound in bytes, too: reading one at each start makes it recently used."""
    store = Store(folder)
    store.put("file", b"bytes")
    write(store, "folder")
    for name in ("file", "folder"):
        os.utime(store.path(name), (1e9, 1e9))
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    assert store.get("file") == b"bytes" and store.read("folder", text_of) == "content"
    monkeypatch.undo()
    assert {entry.used for entry in store.entries()} == {1e9}
    assert store.get("file") == b"bytes" and store.read("folder", text_of) == "content"
    assert all(entry.used > 1e9 for entry in store.entries())
