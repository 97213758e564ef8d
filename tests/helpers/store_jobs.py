"""Work in cache folders while its process is ended or the power fails, and the conditions that must hold afterwards."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle_kernels
from helpers.disk_calls import Mark
from helpers.stored_pages import IDENTITY, chain, payload_of, same
from rekindle._src.capabilities.captures.files import CaptureFiles
from rekindle._src.capabilities.captures.kept import StoredCaptures
from rekindle._src.capabilities.captures.tapped import RequestTaps
from rekindle._src.core import atomic_checkpoint
from rekindle._src.core.atomic_checkpoint import is_finished
from rekindle._src.core.captured import Captured, CapturedPart
from rekindle._src.core.json_lines import JsonLines
from rekindle._src.core.shared_cache import FolderPlace, SharedCache
from rekindle._src.core.store import Store
from rekindle._src.kvcache.persist import prefix_file, snapshot
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.tiers import disk as disk_module
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.notebook.chat import Transcripts
from rekindle.errors import StoreError
from rekindle_kernels import private_files

KEY = ("residual", 1)
UNLIMITED = 1 << 30


def left_over(folder: Path) -> list[str]:
    """The names of unfinished entries in a folder, if there is one."""
    return [path.name for path in folder.iterdir() if not is_finished(path.name)] if folder.is_dir() else []


@contextlib.contextmanager
def all_stale() -> Iterator[None]:
    """Whatever a writer left unfinished counts as left for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_checkpoint, "STALE_SECONDS", -1.0)
        yield


class Job:
    """A job of stores: it begins with an empty folder."""

    def load(self) -> None:
        atomic_checkpoint.orbax()

    def prepare(self, folder: Path) -> None: ...


class Pages(Job):
    """Pages are written, saved under a name again and again, merged, and removed to make room."""

    def pages(self, turn: int) -> list[Page]:
        return [page for number in range(turn + 1) for page, _ in chain(10 * number, 3)]

    def work(self, folder: Path, mark: Mark) -> None:
        disk_module.MANY = 2
        disk = DiskTier(folder / "cache", UNLIMITED, IDENTITY)
        for turn in range(2):
            disk.write(chain(10 * turn, 3))
            snapshot.save(disk.folder, "mine", IDENTITY, self.pages(turn))
            mark(str(turn))
            disk.collect()
        disk.write(chain(100, 2))
        disk.budget, disk.fresh_seconds = disk.statistics().bytes - 1, 0.0
        disk.collect()  # what no snapshot lists goes

    def check(self, folder: Path, marks: Sequence[str], *, cut: bool) -> None:
        disk = DiskTier(folder / "cache", UNLIMITED, IDENTITY)
        disk.scan()
        for page in disk.pages():
            assert same(disk.load(page.digest), payload_of(page.digest)), "a wrong page"
        assert disk.damaged == 0, "damage where nothing was damaged"
        if marks:
            saved = {page.digest for page in self.pages(int(marks[-1]))}
            assert all(digest in disk for digest in saved), "a page of a saved snapshot is lost"
            listed = {page.digest for page in snapshot.pages_of_snapshot(folder / "cache", IDENTITY, "mine")}
            assert listed >= saved
        with all_stale():
            disk.collect()
        for kind in ("pages", "snapshots"):
            assert not left_over(folder / "cache" / kind), "leftovers of a killed writer"
        if not cut:
            disk.write(chain(200, 1))
            snapshot.save(disk.folder, "mine", IDENTITY, [page for page, _ in chain(200, 1)])


class Captures(Job):
    """What was captured of pages is saved with them."""

    def line(self, digest: bytes) -> np.ndarray[Any, Any]:
        return payload_of(digest, size=8)[1].repeat(IDENTITY.page_size, 0)

    def work(self, folder: Path, mark: Mark) -> None:
        disk = DiskTier(folder / "cache", UNLIMITED, IDENTITY)
        pages = [page for page, _ in chain(0, 3)]
        disk.write(chain(0, 3))
        StoredCaptures(disk).save("mine", pages, {KEY: {page.digest: self.line(page.digest) for page in pages}})
        snapshot.save(disk.folder, "mine", IDENTITY, pages)
        mark("saved")

    def check(self, folder: Path, marks: Sequence[str], *, cut: bool) -> None:
        disk = DiskTier(folder / "cache", UNLIMITED, IDENTITY)
        disk.scan()
        captures = StoredCaptures(disk)
        for page, _ in chain(0, 3):
            line = captures.read(KEY, page.digest)
            assert line is None or np.array_equal(line, self.line(page.digest)), "a wrong capture"
            assert not marks or (line is not None and page.digest in disk), "a capture or its page is lost"
        assert disk.damaged == 0


class Folders(Job):
    """Entries that are folders, as programs and weights are: written, and removed beyond a number."""

    def content(self, name: str) -> bytes:
        return payload_of(name.encode().ljust(8), size=5000)[0].tobytes()

    def store(self, folder: Path) -> Store:
        return Store(folder / "cache" / "programs", most=2)

    def work(self, folder: Path, mark: Mark) -> None:
        for name in "abc":
            store = self.store(folder)

            def fill(files: Path, content: bytes = self.content(name)) -> None:
                (files / "program").write_bytes(content)
                (files / "sum").write_text(private_files.checksum("", content))

            store.write(name, fill)
            mark(name)
            store.prune()

    def read(self, path: Path) -> bytes:
        content = (path / "rekindle" / "program").read_bytes()
        if (path / "rekindle" / "sum").read_text() != private_files.checksum("", content):
            raise StoreError("the checksum does not match")
        return content

    def check(self, folder: Path, marks: Sequence[str], *, cut: bool) -> None:
        store = self.store(folder)
        for name in "abc":
            try:
                if store.holds(name):
                    assert store.read(name, self.read) == self.content(name)
                else:
                    assert cut or name not in marks[-1:], "an entry is lost"
            except StoreError:
                assert cut, "an entry is damaged, and no power failed"
                assert not store.holds(name), "a damaged entry blocks its name"
        with all_stale():
            store.prune()
        assert not [name for name in left_over(store.folder) if not name.startswith(atomic_checkpoint.DAMAGED)]


class Files(Job):
    """Files of a cache, and files that a user asked for: prefixes, conversations, rows, captures."""

    def load(self) -> None: ...

    def line(self, number: int) -> dict[str, Any]:
        return {"row": number, "text": "x" * 50}

    def lines(self, folder: Path) -> tuple[JsonLines, list[dict[str, Any]]]:
        entries: list[dict[str, Any]] = []

        def taken(entry: dict[str, Any], at: int) -> bool:
            entries.append(entry)
            return True

        return JsonLines(folder / "rows.jsonl", start='{"row": ', writer="a test", on_entry=taken), entries

    def captured(self, number: int) -> np.ndarray[Any, Any]:
        return np.full((3, 8), number, np.float32)

    def work(self, folder: Path, mark: Mark) -> None:
        private_files.make_folder(folder / "cache" / "chats")
        for number in range(2):
            prefix_file.write(folder / "mine.prefix", IDENTITY, chain(number, 3))
            mark(f"prefix {number}")
            if Transcripts(folder / "cache").save("mine", "tiny", [{"role": "user", "content": str(number)}]):
                mark(f"chat {number}")
            Store(folder / "cache" / "tokenizers", verified=True).put("a", b"content %d" % number)
            lines, _ = self.lines(folder)
            with lines:
                for row in range(3):
                    lines.add(self.line(3 * number + row))
            mark(f"rows {number}")
            tapped = RequestTaps((KEY,), ((0, 3),), layers=2, into=str(folder / "captures"))
            files = CaptureFiles(tapped, 3)
            files.begin()
            files.add(CapturedPart(np.arange(3, dtype=np.int32), {KEY: self.captured(number)}))
            files.finish(3)
            mark(f"captures {number}")

    def check(self, folder: Path, marks: Sequence[str], *, cut: bool) -> None:
        latest = {mark.split()[0]: int(mark.split()[1]) for mark in marks}
        least = {what: latest.get(what, -1) for what in ("prefix", "chat", "rows", "captures")}
        if (folder / "mine.prefix").exists() or "prefix" in latest:
            pages, _ = prefix_file.read(folder / "mine.prefix", IDENTITY)
            first = int(pages[0][0].tokens[0])
            assert first in range(least["prefix"], 2) and len(pages) == 3
            assert all(same(payload, payload_of(page.digest)) for page, payload in pages)
        if Transcripts(folder / "cache").names() or "chat" in latest:
            _, messages = Transcripts(folder / "cache").load("mine")
            assert int(messages[0]["content"]) in range(least["chat"], 2)
        assert Store(folder / "cache" / "tokenizers", verified=True).get("a") in (None, b"content 0", b"content 1")
        lines, entries = self.lines(folder)
        with lines:
            assert entries == [self.line(row) for row in range(len(entries))]
            assert len(entries) >= 3 * (least["rows"] + 1)
            lines.add(self.line(len(entries)))
        whole = sorted((folder / "captures").glob("*/*.safetensors"))
        assert len(whole) > least["captures"]
        for number, path in enumerate(whole):
            captured = Captured.load(path.parent)
            assert np.array_equal(captured[KEY], self.captured(number)), "a capture that is whole by its name is not"


class Weights(Job):
    """Weights are kept in their final form, read again, and kept anew where they are not there."""

    @functools.cached_property
    def model(self) -> Path:
        from helpers import checkpoints

        folder = Path(os.environ["REKINDLE_TEST_MODEL"])
        return folder if (folder / "config.json").exists() else checkpoints.write(folder, checkpoints.CASES["llama"])

    def load(self) -> None:
        atomic_checkpoint.orbax()
        assert self.model

    def loaded(self, folder: Path) -> Any:
        from rekindle._src.models.loading import checkpoint, prepared

        prepared.MIN_BYTES = 0
        loaded = checkpoint.load(self.model, quantize=None, cache_dir=folder / "cache")
        assert prepared.wait(60)
        return loaded

    def work(self, folder: Path, mark: Mark) -> None:
        self.loaded(folder)
        mark("kept")

    def check(self, folder: Path, marks: Sequence[str], *, cut: bool) -> None:
        from helpers import checkpoints

        expected = self.loaded(self.model)
        for _ in range(2):
            checkpoints.assert_same(self.loaded(folder), expected)
        kept = [path for path in (folder / "cache" / "weights").iterdir() if is_finished(path.name)]
        assert len(kept) == 1 and (kept[0] / "rekindle" / "model.json").stat().st_size, "they are not kept again"


class Shared(Job):
    """A snapshot goes into a shared cache, and another machine fetches it."""

    def machine(self, folder: Path, name: str) -> tuple[DiskTier, SharedCache]:
        disk = DiskTier(folder / name, UNLIMITED, IDENTITY)
        shared = SharedCache(folder / name, "a folder", FolderPlace(folder / "shared"), None)
        rekindle_kernels.read_through.attach(folder / name, shared)
        return disk, shared

    def work(self, folder: Path, mark: Mark) -> None:
        disk, shared = self.machine(folder, "one")
        pages = [page for page, _ in chain(0, 3)]
        disk.write(chain(0, 3))
        path = snapshot.save(disk.folder, "mine", IDENTITY, pages)
        snapshot.keep_shared(path, disk.segments_of(page.digest for page in pages))
        assert shared.wait(60)
        disk, _ = self.machine(folder, "two")
        snapshot.fetch_shared(disk.folder, "mine", IDENTITY, UNLIMITED)
        if disk.scan() == 3:
            mark("fetched")

    def check(self, folder: Path, marks: Sequence[str], *, cut: bool) -> None:
        disk, _ = self.machine(folder, "two")
        snapshot.fetch_shared(disk.folder, "mine", IDENTITY, UNLIMITED)
        disk.scan()
        for page in disk.pages():
            assert same(disk.load(page.digest), payload_of(page.digest)), "a wrong page"
        assert disk.damaged == 0
        if marks:
            assert len(snapshot.pages_of_snapshot(disk.folder, IDENTITY, "mine")) == len(disk) == 3
        with all_stale():
            disk.collect()
        assert not left_over(folder / "two" / "pages")


PAGES, CAPTURES, FOLDERS, FILES = Pages(), Captures(), Folders(), Files()
WEIGHTS, SHARED = Weights(), Shared()
logging.getLogger("rekindle").addHandler(logging.NullHandler())
