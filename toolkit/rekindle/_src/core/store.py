"""The cache folder: entries by kind and name, with one set of rules for all kinds.

A kind is a folder of the cache. An entry is a file, or a folder of files (`atomic_checkpoint`). Entries are

- trusted only where no other user could have written them, or where they are signed (`private_files`);
- complete or absent, so that processes may share a cache;
- set aside when they prove damaged: an error that passes, such as a failing disk, proves nothing;
- touched when they are used: the time of an entry's last change is the time of its last use, which copies keep;
- bounded by number, bytes or age: the least recently used are removed first;
- fetched from the shared cache when they are missed, and kept there (`read_through`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from rekindle._src.core.atomic_checkpoint import (
    DAMAGED,
    KEPT_DAMAGED,
    is_finished,
    is_passing,
    is_stale,
    order_of_use,
    remove,
    set_aside,
    write_checkpoint,
)
from rekindle.errors import StoreError
from rekindle_kernels import private_files, read_through

T = TypeVar("T")
log = logging.getLogger("rekindle.cache")
_SUM = 32  # bytes of a checksum


class Entry(NamedTuple):
    """One entry of a store."""

    path: Path
    used: float  # seconds since the epoch
    size: int  # bytes


@dataclasses.dataclass(slots=True)
class FolderRoom:
    """Half of the room that the bounds of a folder leave: after that much is written, it is looked through again."""

    entries: float
    bytes: float

    @property
    def is_used_up(self) -> bool:
        return self.entries <= 0 or self.bytes <= 0


_rooms: dict[tuple[Path, int | None, int | None], FolderRoom] = {}  # of this process, by folder and bounds


class Unusable(StoreError):
    """An entry can't be used. `passing` is True if it stays, since the next attempt may succeed."""

    def __init__(self, error: Exception, *, passing: bool) -> None:
        super().__init__(f"{type(error).__name__}: {error}".splitlines()[0][:200])
        self.error, self.passing = error, passing


class Sound(StoreError):
    """Raised by a reader that finds an entry in order, and of no use to this process."""


class Store:
    """The entries of one kind in a cache folder."""

    log: ClassVar[logging.Logger] = log  # of `warn_once`

    def __init__(
        self,
        folder: Path,
        *,
        most: int | None = None,
        max_bytes: int | None = None,
        max_age: float | None = None,
        kept_damaged: int = KEPT_DAMAGED,
        verified: bool = False,
    ) -> None:
        """Look after `folder`, which lies in a cache folder and has the name of the kind.

        With `verified`, files have a checksum before their content, and one that does not fit is no entry.
        """
        self.folder, self.verified = folder, verified
        self.most, self.max_bytes, self.max_age, self.kept_damaged = most, max_bytes, max_age, kept_damaged
        self._pruning = threading.Lock()
        self._warned: set[str] = set()
        self.distrusted = private_files.distrust_reason(folder)  # the reason why nothing is read or written here
        if self.distrusted is not None:
            private_files.tell_once(self.distrusted)

    def path(self, name: str) -> Path:
        """Return the place of an entry."""
        return self.folder / (private_files.stored_name(name) if self.folder.name in private_files.SIGNED else name)

    # Files.

    def get(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is missing or untrusted. Raise OSError."""
        if self.distrusted is not None:
            return None
        try:
            content = private_files.read(self.path(name), inside=self.folder)
        except FileNotFoundError:
            return None
        private_files.touch(self.path(name))
        if not self.verified:
            return content
        checksum, content = content[:_SUM], content[_SUM:]
        if checksum == _checksum(name, content):
            return content
        log.warning("%s is damaged: it is removed, and made again", self.path(name))
        self.remove(name)
        return None

    def put(self, name: str, content: bytes, *, durable: bool = False) -> bool:
        """Write a file, after making room for it; return False where nothing is trusted. Raise OSError.

        `durable` is as in `private_files.write`.
        """
        if self.distrusted is not None:
            return False
        private_files.make_folder(self.folder)
        if self.most is not None:
            self.prune(room=1)
        parts = [_checksum(name, content), content] if self.verified else [content]
        private_files.write(self.path(name), parts, durable=durable)
        if self.max_bytes is not None:
            self.prune_after(sum(map(len, parts)))
        return True

    def remove(self, name: str) -> None:
        """Remove an entry, if it is there and can be removed."""
        _remove(self.path(name))

    # Folders of files.

    def holds(self, name: str) -> bool:
        """True if there is a folder of this name, which may turn out to be unusable."""
        path = self.path(name)
        return self.distrusted is None and (path.is_dir() or read_through.fetch(path))

    def read(self, name: str, reader: Callable[[Path], T], errors: tuple[type[Exception], ...] = (Exception,)) -> T:
        """Return the result of `reader`, which is called with the place of an entry.

        Raise Unusable for its `errors`; a damaged entry is set aside. Raise `Sound`, and other errors, unchanged.
        """
        path = self.path(name)
        try:
            result = reader(path)
        except Sound:
            raise
        except errors as error:
            raise self.unusable(name, error) from error
        private_files.touch(path)
        read_through.keep(path)
        return result

    def unusable(self, name: str, error: Exception) -> Unusable:
        """Return the error for an entry that raised `error` when it was read. A damaged entry is set aside."""
        passing = is_passing(error)
        if not passing:
            set_aside(self.path(name), keep=self.kept_damaged)
        return Unusable(error, passing=passing)

    def content(self, name: str, file: str) -> bytes:
        """Return the content of one of an entry's files. Raise OSError."""
        return private_files.read(self.path(name) / file, inside=self.folder)

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Write a folder of files, which `write` fills, unless another process was faster. Raise its errors."""
        path = self.path(name)
        try:
            write_checkpoint(path, write)
        except Exception:
            if not path.is_dir():
                raise
        read_through.keep(path)

    def warn_once(self, topic: str, text: str) -> None:
        """Log `text`, once for each `topic`."""
        if topic not in self._warned:
            self._warned.add(topic)
            self.log.warning(text)

    # Room.

    def entries(self) -> list[Entry]:
        """Return the finished entries, most recently used first."""
        entries = []
        for path in self._paths():
            if is_finished(path.name) and not path.name.startswith("."):
                with contextlib.suppress(OSError):  # another process removed it meanwhile
                    size = 0 if self.max_bytes is None else _size(path)
                    entries.append(Entry(path, path.stat().st_mtime, size))
        return sorted(entries, key=lambda entry: -order_of_use(entry.used))

    def is_broken(self, path: Path) -> bool:
        """True if a finished entry can't be used by any process. A passing error proves nothing."""
        return False

    def prune(self, *, room: int = 0) -> None:
        """Remove entries beyond the bounds with `room` further ones, and old ones that are unfinished or broken."""
        with self._pruning:
            self._prune(room)

    def prune_after(self, size: int) -> None:
        """Prune after an entry of `size` bytes was written, once half of the room within the bounds is used.

        Looking through two thousand programs takes longer than compiling a small one. The other half is for processes
        that write into the folder at the same time. A full folder is looked through after each write.
        """
        with self._pruning:
            room = _rooms.get(self._bounds)
            if room is not None:
                room.entries, room.bytes = room.entries - 1, room.bytes - size
            if room is None or room.is_used_up:
                self._prune(0)

    @property
    def _bounds(self) -> tuple[Path, int | None, int | None]:
        return self.folder, self.most, self.max_bytes

    def _prune(self, room: int) -> None:
        total, oldest = 0, 0.0 if self.max_age is None else time.time() - self.max_age
        kept, kept_bytes = room, 0
        for count, entry in enumerate(self.entries(), 1 + room):
            total += entry.size
            beyond = (self.most is not None and count > self.most) or (
                self.max_bytes is not None and total > self.max_bytes
            )
            if beyond or entry.used < oldest:
                _remove(entry.path)
            else:
                kept, kept_bytes = kept + 1, kept_bytes + entry.size
        _rooms[self._bounds] = FolderRoom(
            (math.inf if self.most is None else self.most - kept) / 2,
            (math.inf if self.max_bytes is None else self.max_bytes - kept_bytes) / 2,
        )
        for path in self._paths():
            unfinished = not is_finished(path.name) or path.name.startswith(".")
            if not path.name.startswith(DAMAGED) and (unfinished or self.is_broken(path)) and is_stale(path):
                _remove(path)

    def _paths(self) -> list[Path]:
        with contextlib.suppress(OSError):  # a folder that can't be listed now is pruned next time
            return list(self.folder.iterdir())
        return []


def _checksum(name: str, content: bytes) -> bytes:
    return private_files.checksum(name, content).encode()


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _remove(path: Path) -> None:
    if path.is_dir():
        remove(path)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
