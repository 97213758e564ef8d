"""A cache that machines share: what comes from there is complete and signed, and whatever is wrong costs time alone."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import ConfigError, MissingExtra, StoreError
from rekindle._src.core import shared_cache
from rekindle._src.core.shared_cache import (
    MAGIC,
    BlobPlace,
    FolderPlace,
    SharedCache,
    attach,
    pack,
    place_of,
    unpack,
)
from rekindle_kernels import private_files, read_through

KEY = b"k" * 32
FILES = {"rekindle/program": b"\x00\x01" * 5000, "rekindle/meta.json": b"{}", "_METADATA": b""}


def entry(folder: Path, name: str = "abc", kind: str = "programs") -> Path:
    path = folder / kind / name
    for file, content in FILES.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(content)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def blob_of(path: Path, name: str, key: bytes | None = None) -> bytes:
    out = io.BytesIO()
    assert pack(path, name, key, out) == len(out.getvalue())
    return out.getvalue()


@pytest.mark.parametrize("key", [None, KEY])
def test_an_entry_comes_back_as_it_was(tmp_path: Path, key: bytes | None) -> None:
    blob = blob_of(entry(tmp_path), "programs/abc", key)
    size = unpack(io.BytesIO(blob), "programs/abc", key, tmp_path / "back", 1 << 20)
    assert size == sum(map(len, FILES.values())) and contents(tmp_path / "back") == FILES
    file = tmp_path / "gemm.o"
    file.write_bytes(b"code")
    unpack(io.BytesIO(blob_of(file, "native/gemm.o", key)), "native/gemm.o", key, tmp_path / "one", 1 << 20)
    assert (tmp_path / "one").read_bytes() == b"code"


@pytest.mark.parametrize("at", [0, 17, 30, 200, 5000, -1])
def test_a_blob_that_was_changed_is_refused(tmp_path: Path, at: int) -> None:
    blob = bytearray(blob_of(entry(tmp_path), "programs/abc", KEY))
    blob[at] ^= 1
    with pytest.raises(StoreError):
        unpack(io.BytesIO(blob), "programs/abc", KEY, tmp_path / "back", 1 << 20)


def test_a_blob_without_the_key_is_refused(tmp_path: Path) -> None:
    path = entry(tmp_path)
    for number, (made, read) in enumerate([(None, KEY), (b"x" * 32, KEY), (KEY, None)]):
        blob = io.BytesIO(blob_of(path, "programs/abc", made))
        with pytest.raises(StoreError, match="mark"):
            unpack(blob, "programs/abc", read, tmp_path / str(number), 1 << 20)


def test_a_blob_of_another_entry_or_cut_off_or_too_large_is_refused(tmp_path: Path) -> None:
    blob = blob_of(entry(tmp_path), "programs/abc")
    for content, name, most, match in (
        (blob, "programs/xyz", 1 << 20, "the blob of 'programs/abc'"),
        (blob[:3000], "programs/abc", 1 << 20, "cut off"),
        (blob[:-5], "programs/abc", 1 << 20, "cut off"),
        (b"", "programs/abc", 1 << 20, "cut off"),
        (blob, "programs/abc", 100, "room for 100"),
    ):
        with pytest.raises(StoreError, match=match):
            unpack(io.BytesIO(content), name, None, tmp_path / f"{match}{len(content)}", most)


@pytest.mark.parametrize("path", ["../evil", "/evil", "a/../../evil", "a\\evil", "", "a\0b"])
def test_files_stay_within_their_entry(tmp_path: Path, path: str) -> None:
    header = json.dumps({"name": "programs/abc", "files": [[path, 1], ["b", 1]]}).encode()
    blob = MAGIC + len(header).to_bytes(8, "little") + header + b"xx" + bytes(32)
    with pytest.raises(StoreError, match=r"has a file|makes no sense"):
        unpack(io.BytesIO(blob), "programs/abc", None, tmp_path / "back", 1 << 20)
    assert not (tmp_path / "evil").exists() and not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    "header", [b"[]", b"{}", b"\xff", b'{"name": "n", "files": []}', b'{"name": "n", "files": [["a", -1]]}']
)
def test_headers_that_make_no_sense_are_refused(tmp_path: Path, header: bytes) -> None:
    blob = MAGIC + len(header).to_bytes(8, "little") + header + bytes(64)
    with pytest.raises(StoreError):
        unpack(io.BytesIO(blob), "n", None, tmp_path / "back", 1 << 20)


@pytest.fixture(params=["folder", "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobPlace]:
    if request.param == "folder":
        yield place_of(str(tmp_path / "shared"))
    elif request.param == "file":
        yield place_of(f"file://{tmp_path}/shared")
    else:
        fsspec = pytest.importorskip("fsspec", reason="the extra `shared`")
        yield place_of("memory://rekindle")
        fsspec.filesystem("memory").rm("/rekindle", recursive=True)


def backed(folder: Path, place: BlobPlace, key: bytes | None = KEY) -> SharedCache:
    return SharedCache(folder, "the place", place, key)


def test_one_machine_keeps_and_another_fetches(tmp_path: Path, place: BlobPlace) -> None:
    entry(tmp_path / "one")
    one, two = backed(tmp_path / "one", place), backed(tmp_path / "two", place)
    assert not two.fetch("programs", "abc") and two.missed == 1
    one.keep("programs", "abc")
    assert one.wait(60) and one.stored == 1
    assert two.fetch("programs", "abc") and contents(tmp_path / "two" / "programs" / "abc") == FILES
    assert two.names("programs") == ["abc"] and two.names("weights") == []
    one.keep("programs", "abc")
    backed(tmp_path / "one", place).keep("programs", "abc")
    assert one.stored == 1 and (one.failed, two.failed) == (0, 0)
    status = (tmp_path / "two" / "programs" / "abc" / "rekindle" / "program").stat()
    assert status.st_mode & 0o077 == 0
    assert [path.name for path in (tmp_path / "two" / "programs").iterdir()] == ["abc"]


def test_what_is_refused_is_replaced_by_what_is_made_here(tmp_path: Path, place: BlobPlace, caplog: Any) -> None:
    entry(tmp_path / "one")
    forged = backed(tmp_path / "one", place, b"x" * 32)
    forged.keep("programs", "abc")
    assert forged.wait(60)
    two = backed(tmp_path / "two", place)
    assert not two.fetch("programs", "abc") and two.refused == 1
    assert "made with another key" in caplog.text and not (tmp_path / "two" / "programs" / "abc").exists()
    assert two.names("programs") == [], "it would keep the place of a good one"
    entry(tmp_path / "two")
    two.keep("programs", "abc")
    assert two.wait(60) and backed(tmp_path / "three", place).fetch("programs", "abc")


def test_old_blobs_go_and_those_in_use_stay(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "shared")
    one = backed(tmp_path / "one", place)
    for name in ("a", "b", "c", "d"):
        entry(tmp_path / "one", name)
        one.keep("programs", name)
    assert one.wait(60)
    now = time.time()
    for age, name in enumerate(("d", "c", "b", "a")):
        os.utime(place.root / "programs" / name, (now - 3600 * age,) * 2)
    assert one.prune() == 0
    size = place.list_blobs("programs")[0].size
    one.max_bytes = 3 * size
    assert one.prune() == size and sorted(one.names("programs")) == ["b", "c", "d"]
    one.max_age = 5400
    assert one.prune() == size and sorted(one.names("programs")) == ["c", "d"]
    one._handled.clear()
    one.keep("programs", "c")  # over half of the age: written again
    assert one.wait(60) and one.names("programs") == ["d", "c"]


def test_a_place_that_fails_is_asked_no_more(tmp_path: Path, caplog: Any) -> None:
    class Broken:
        calls = 0

        def open(self, kind: str, name: str) -> Any:
            self.calls += 1
            raise ConnectionError("no route")

    place: Any = Broken()
    one = backed(tmp_path, place)
    assert not any(one.fetch("programs", str(number)) for number in range(10))
    assert place.calls == shared_cache.FAILURES and caplog.text.count("no route") == 1


def test_only_known_kinds_and_trusted_folders(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "shared")
    entry(tmp_path / "one")
    one, two = backed(tmp_path / "one", place), backed(tmp_path / "two", place)
    one.keep("programs", "abc"), one.keep("chats", "x")
    assert one.wait(60) and one.stored == 1
    assert not two.fetch("chats", "x")
    (tmp_path / "two" / "programs").mkdir(parents=True)
    (tmp_path / "two").chmod(0o777)
    assert not two.fetch("programs", "abc")


def test_a_shared_cache_needs_a_key_or_privacy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(private_files.KEY_VARIABLE, raising=False)
    folder = tmp_path / "cache"
    try:
        attach(str(tmp_path / "shared"), [folder])
        assert isinstance(read_through.backing_of(folder), SharedCache)
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        with pytest.raises(ConfigError, match="anyone who can write there"):
            attach(str(tmp_path / "open"), [folder])
        pytest.importorskip("fsspec", reason="the extra `shared`")
        with pytest.raises(ConfigError, match="REKINDLE_SIGNING_KEY"):
            attach("memory://rekindle", [folder])
        key = tmp_path / "key"
        key.write_bytes(b"a secret of these tests")
        key.chmod(0o600)
        monkeypatch.setenv(private_files.KEY_VARIABLE, str(key))
        attach("memory://rekindle", [folder])
        attach(str(tmp_path / "open"), [folder])
        before = read_through.backing_of(folder)
        attach(str(tmp_path / "open"), [folder])
        assert read_through.backing_of(folder) is before
        monkeypatch.setenv(private_files.KEY_VARIABLE, str(tmp_path / "nothing"))
        with pytest.raises(ConfigError, match="nothing"):
            attach(str(tmp_path / "open"), [folder])
        monkeypatch.delenv(private_files.KEY_VARIABLE)
        monkeypatch.setenv(shared_cache.VARIABLE, str(tmp_path / "shared"))
        attach(None, [folder])
        assert str(tmp_path / "shared") in repr(read_through.backing_of(folder))
    finally:
        monkeypatch.delenv(shared_cache.VARIABLE, raising=False)
        attach(None, [folder])
    assert read_through.backing_of(folder) is None


def test_a_folder_whose_parent_does_not_exist_is_refused_and_not_made(tmp_path: Path) -> None:
    wrong = tmp_path / "typo" / "more" / "shared"
    with pytest.raises(ConfigError, match=f"^shared_cache=.*does not exist: {re.escape(str(tmp_path / 'typo'))}"):
        attach(str(wrong), [tmp_path / "cache"])
    assert not [*tmp_path.iterdir()]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(MissingExtra, match="shared"):
        place_of("memory://rekindle")
    monkeypatch.undo()
    pytest.importorskip("fsspec", reason="the extra `shared`")
    with pytest.raises(ConfigError, match="shared_cache"):
        place_of("nothing-known://bucket")


def test_times_of_stores_are_read() -> None:
    for value in (5.0, "1970-01-01T00:00:05+00:00", __import__("datetime").datetime.fromtimestamp(5.0)):
        assert shared_cache.write_time({"LastModified": value}) == 5.0
    assert abs(shared_cache.write_time({}) - time.time()) < 5


def test_large_files_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "weights" / "abc"
    path.mkdir(parents=True)
    content = os.urandom(9 << 20) * 4
    (path / "weights.safetensors").write_bytes(content)
    blob = bytearray(blob_of(path, "weights/abc", KEY))
    unpack(io.BytesIO(blob), "weights/abc", KEY, tmp_path / "back", 1 << 30)
    assert (tmp_path / "back" / "weights.safetensors").read_bytes() == content
    blob[20 << 20] ^= 1
    with pytest.raises(StoreError, match="mark"):
        unpack(io.BytesIO(blob), "weights/abc", KEY, tmp_path / "again", 1 << 30)


def test_the_mark_of_an_upload_goes_on_while_the_process_ends() -> None:
    """Python ends all pools before `atexit` waits for uploads."""
    pieces = [bytes([number]) * shared_cache.PIECE for number in range(4)]
    expected, ending = shared_cache.BlobSignature(b"key"), shared_cache.BlobSignature(b"key")
    for number, piece in enumerate(pieces):
        expected.added(piece)
        ending.added(piece)
        if number == 1 and ending._pool is not None:
            ending._pool.shutdown(wait=False)
    assert ending.digest() == expected.digest()
