"""A file layer that fails: any operation below one folder may raise EIO, EMFILE, ENOSPC, ENOMEM or another errno.

Opening, renaming, removing, listing and mapping go through Python's audit hooks, which may raise in their place;
reading and writing through file objects whose methods raise. C code that reads a descriptor by itself is not reached.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

READING = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENOMEM, errno.EACCES)
WRITING = (errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EROFS)
CHANGES = frozenset(
    {
        "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.utime",
        "os.truncate",
    }
)  # fmt: skip
KEEPS_SIZE = frozenset({"os.rename", "os.remove", "os.rmdir", "os.chmod", "os.utime", "os.truncate"})
LOOKS = frozenset({"os.listdir", "os.scandir"})


class Faults:
    """Faults below `folder`, each operation with probability `rate` while `active()`; counts what it did."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = os.path.realpath(folder)
        self.rate = 0.0
        self.injected: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @contextmanager
    def active(self, rate: float) -> Iterator[Faults]:
        """Fail inside the block; one instance at a time in a process."""
        _install()
        assert _current[0] is None, "one fault layer at a time"
        _current[0], self.rate = self, rate
        opens = builtins.open, io.open, os.write
        builtins.open = io.open = _opened(opens[0])  # type: ignore[assignment]
        os.write = _written(opens[2])  # type: ignore[assignment]
        try:
            yield self
        finally:
            builtins.open, io.open, os.write = opens
            _current[0], self.rate = None, 0.0

    def covers(self, path: Any) -> bool:
        """Whether a path lies below the folder; relative ones and descriptors do not."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return os.fspath(path if not isinstance(path, bytes) else os.fsdecode(path)).startswith(self.folder)

    def maybe(self, operation: str, kinds: tuple[int, ...], path: Any) -> None:
        """Raise for this operation, or not."""
        with self._lock:
            self.seen[operation] += 1
            if self._random.random() >= self.rate:
                return
            number = self._random.choice(kinds)
            self.injected[f"{operation} {errno.errorcode[number]}"] += 1
        raise OSError(number, f"injected: {os.strerror(number)}", str(path))


class Refusing(Faults):
    """A disk that refuses changes: a read-only one (EROFS) all of them, a full one (ENOSPC) what needs room."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder)
        self.number = number

    def maybe(self, operation: str, kinds: tuple[int, ...], path: Any) -> None:
        if kinds is READING or (self.number == errno.ENOSPC and operation in KEEPS_SIZE):
            return
        self.injected[operation] += 1
        raise OSError(self.number, os.strerror(self.number), str(path))


_current: list[Faults | None] = [None]
_installed = False


def _install() -> None:
    """Audit hooks stay for the life of the process; this one does nothing while no fault layer is active."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    faults = _current[0]
    if faults is None or not arguments or not faults.covers(arguments[0]):
        return
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR)) if isinstance(flags, int) else "r" not in str(mode)
        faults.maybe("open to write" if writes else "open to read", WRITING if writes else READING, arguments[0])
    elif event in CHANGES:
        faults.maybe(event, WRITING, arguments[0])
    elif event in LOOKS:
        faults.maybe(event, READING, arguments[0])


def _opened(plain: Any) -> Any:
    """`open` whose files below the folder fail while they are read and written."""

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        found = plain(file, mode, *arguments, **options)
        faults = _current[0]
        return _File(found, faults, file) if faults is not None and faults.covers(file) else found

    return opened


def _written(plain: Any) -> Any:
    def written(descriptor: int, data: Any) -> int:
        faults = _current[0]
        if faults is not None:
            try:
                path = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                path = ""
            if faults.covers(path):
                faults.maybe("write", WRITING, path)
        return int(plain(descriptor, data))

    return written


class _File:
    """A file object that may fail in `read` and `write`; everything else is the real one's."""

    def __init__(self, file: Any, faults: Faults, path: Any) -> None:
        self._file, self._faults, self._path = file, faults, path

    def read(self, *arguments: Any) -> Any:
        self._faults.maybe("read", READING, self._path)
        return self._file.read(*arguments)

    def readinto(self, *arguments: Any) -> Any:
        self._faults.maybe("read", READING, self._path)
        return self._file.readinto(*arguments)

    def write(self, *arguments: Any) -> Any:
        self._faults.maybe("write", WRITING, self._path)
        return self._file.write(*arguments)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
