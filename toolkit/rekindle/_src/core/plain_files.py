"""Opens files that others wrote: regular files only, and only up to a reasonable size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises `OSError` for anything else.

    Opening a FIFO would wait for a writer, perhaps for ever; a device has no size to check.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, limit: int) -> bytes:
    """Return the content of a regular file. Raises `OSError`, before reading, if it has more than `limit` bytes."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes, and at most {limit:,} are read", str(path))
        return file.read(size) if size else b""
