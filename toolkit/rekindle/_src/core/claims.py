"""Claims: one process makes an entry of the cache while others that want it wait, and then take it.

A claim is an advisory lock on a file in the folder of the entries. The operating system ends it with its process: a
dead process holds no other up. Where there are no such locks (some network file systems) each makes its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from rekindle_kernels import private_files, system

POLL = 0.1  # seconds
WANTED = ".wanted"  # touched by waiting processes: the holder writes without its usual delay


class Claim:
    """A claim on an entry; without a `file` it is invisible to other processes."""

    def __init__(self, path: Path | None = None, file: int = -1) -> None:
        self._path, self._file = path, file

    def release(self) -> None:
        """End it. A second call does nothing."""
        if self._file >= 0:
            file, self._file = self._file, -1
            assert self._path is not None
            with contextlib.suppress(OSError):
                self._path.unlink()  # who waits for this file gets it all the same, and finds the entry
            os.close(file)


def claimed(folder: Path, name: str, made: Callable[[], bool], patience: float) -> Claim | None:
    """Claim an entry of a folder. None if another process, which is waited for, has made it meanwhile.

    After `patience` seconds, and where nothing can be locked, the caller makes it too.
    """
    path, end = folder / f".{name}.making", time.monotonic() + patience
    try:
        private_files.make_folder(folder)
        file = system.open_file(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        return Claim()  # a cache that can't be written to, or a full disk
    while True:
        try:
            locked = system.try_lock(file)
        except OSError:  # no locks here
            break
        if locked:
            if not made():
                return Claim(path, file)
            break
        if time.monotonic() >= end:
            break
        with contextlib.suppress(OSError):
            (folder / WANTED).touch(0o600)
        time.sleep(POLL)
    os.close(file)
    return None if made() else Claim()


def wanted(folder: Path, since: float) -> bool:
    """True if someone has waited for an entry of a folder since then, in seconds since the epoch."""
    try:
        return (folder / WANTED).stat().st_mtime >= since
    except OSError:
        return False
