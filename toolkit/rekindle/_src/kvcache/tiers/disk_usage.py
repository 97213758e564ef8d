"""The size and age of segments on disk, and the lock of the process that may remove some."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rekindle_kernels import private_files


@contextlib.contextmanager
def exclusively(pages_folder: Path) -> Iterator[bool]:
    """Yield True if this process alone may remove segments now. Other processes get False until the block ends."""
    try:
        private_files.make_folder(pages_folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(pages_folder.parent / ".pages.lock", flags, 0o600)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def size_of(path: Path) -> tuple[int, float]:
    """Return bytes and time of last use. A path that can't be read counts as just used, so that it is not removed."""
    total = 0
    try:
        for folder, _, files in os.walk(path, onerror=_raise):
            total += sum(os.stat(os.path.join(folder, file)).st_size for file in files)
        return total, path.stat().st_mtime
    except OSError:
        return total, time.time()


def age_of(name: str) -> str:
    """Return the sort key of segments: the time in the name, "" for other names."""
    return name.split("-")[1] if name.count("-") == 2 else ""


def _raise(error: OSError) -> None:
    raise error
