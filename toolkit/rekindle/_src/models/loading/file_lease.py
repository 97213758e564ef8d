"""A lease on a mapped file: Linux lets no other process write to it or cut it off before this one has let go.

Reading mapped memory behind the end of a file that was cut off ends the process (SIGBUS). With a lease, a process that
opens the file for writing or truncates it has to wait, 45 s unless /proc/sys/fs/lease-break-time says otherwise, and
`is_breaking` tells the holder, who copies what it still needs and releases. Removing or renaming the file needs no
lease: what is mapped stays. No signal handler takes part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_F_SETSIG = 10  # which signal tells the holder; SIGURG is ignored unless a program asks for it
_TAKEN = (errno.EAGAIN, errno.EACCES)  # open for writing somewhere, or another user's


class FileLease:
    """A lease held until `release`, or until Linux takes it from a holder that is too slow to release it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def is_breaking(self) -> bool:
        """True if another process waits to write to the file, or no longer has to."""
        if self._descriptor is None:
            return True
        return fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def release(self) -> None:
        """Let others write to it; may be called again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # a forked child may have the descriptor too: closing is not enough
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.close(descriptor)


def take(path: Path) -> FileLease | None:
    """Return a lease, or None where the system or the file system has none.

    Raise OSError if the file is not this user's alone.
    """
    if sys.platform != "linux":
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _TAKEN:
            raise
        return None
    return FileLease(descriptor)
