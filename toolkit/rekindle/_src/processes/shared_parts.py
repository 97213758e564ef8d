"""Memory that two processes of one machine share, through which bulk data passes a part at a time.

The sending side fills a part, and reports it by a byte on the connection; the receiving side copies it out, and reports
that by a byte back. So each byte is copied twice, at the speed of memory, and neither side waits for the kernel.

The memory is a file without a name (Linux), which the other process opens by the number of the process and of the file.
A random number at its beginning, repeated in a signed message, proves that it is the right one. It can't
shrink: reading beyond the end of a mapped file would kill the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import ProcessLost

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PART, PARTS = 512 << 10, 8  # few enough to stay in the processor's caches
_RANDOM, _FIRST = 32, mmap.PAGESIZE  # the parts begin behind the number
_SIZE = _FIRST + PART * PARTS
_REPORT = b"\0"


class SendMemory:
    """The memory of the sending side. Raises OSError on systems without it."""

    def __init__(self) -> None:
        if fcntl is None or not hasattr(os, "memfd_create"):
            raise OSError("this system has no files without a name")
        self._number = secrets.token_bytes(_RANDOM)
        self._file = os.memfd_create("rekindle pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, _SIZE)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapped = mmap.mmap(self._file, _SIZE)
        except BaseException:
            self.close()
            raise
        mapped[:_RANDOM] = self._number
        self._memory = np.frombuffer(mapped, np.uint8)[_FIRST:]
        self._filled = self._emptied = 0  # parts, since the beginning

    def offer(self) -> dict[str, Any]:
        """Return an offer with which the other side finds the memory, for a signed message."""
        return {"process": os.getpid(), "file": self._file, "number": self._number.hex(), "size": _SIZE}

    def close(self) -> None:
        """Close the file, so that no other process can open it; existing mappings stay."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def send(self, connection: socket.socket, pieces: Sequence[memoryview]) -> None:
        """Send the bytes of all pieces. Raises OSError if the connection is gone."""
        for views in _cut(pieces):
            if self._filled - self._emptied == PARTS:
                self._await_reports(connection, PARTS)
            _copy(self._memory, self._filled % PARTS * PART, views, out=False)
            self._filled += 1
            connection.sendall(_REPORT)

    def finish(self, connection: socket.socket) -> None:
        """Wait until the other side has copied all parts; its next message comes behind that."""
        while self._filled != self._emptied:
            self._await_reports(connection, self._filled - self._emptied)

    def _await_reports(self, connection: socket.socket, limit: int) -> None:
        self._emptied += _receive_reports(connection, limit)


class ReceiveMemory:
    """The memory of the sending side in the receiving process, read-only."""

    def __init__(self, offer: Any) -> None:
        """Map the offered memory. Raises OSError if this process can't open it, or if it might shrink."""
        if fcntl is None:
            raise OSError("this system has no files without a name")
        process, file, number = _parse_offer(offer)
        descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != _SIZE:
                raise OSError("it has another size")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("it could shrink")
            mapped = mmap.mmap(descriptor, _SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        if not secrets.compare_digest(mapped[:_RANDOM], number):
            raise OSError("it is another one")
        self._memory = np.frombuffer(mapped, np.uint8)[_FIRST:]
        self._copied = 0  # parts, since the beginning

    def receive(self, connection: socket.socket, pieces: Sequence[memoryview]) -> None:
        """Fill the pieces with bytes from the other side. Raises ProcessLost or OSError if they don't come."""
        left, ready = -(-sum(len(piece) for piece in pieces) // PART), 0
        for views in _cut(pieces):
            if not ready:
                ready = _receive_reports(connection, min(left, PARTS))
            _copy(self._memory, self._copied % PARTS * PART, views, out=True)
            self._copied += 1
            left, ready = left - 1, ready - 1
            connection.sendall(_REPORT)


def _parse_offer(offer: Any) -> tuple[int, int, bytes]:
    """Parse an offer: process, file and number. Raises OSError if it makes no sense."""
    if isinstance(offer, Mapping):
        process, file, number = offer.get("process"), offer.get("file"), offer.get("number")
        if type(process) is int and type(file) is int and isinstance(number, str) and offer.get("size") == _SIZE:
            with contextlib.suppress(ValueError):
                content = bytes.fromhex(number)
                if len(content) == _RANDOM:
                    return process, file, content
    raise OSError("what is offered makes no sense")


def _cut(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the pieces' bytes in their order, in parts of `PART` bytes but for the last."""
    views: list[memoryview] = []
    room = PART
    for piece in pieces:
        at = 0
        while at < len(piece):
            views.append(piece[at : at + room])
            at += len(views[-1])
            room -= len(views[-1])
            if not room:
                yield views
                views, room = [], PART
    if views:
        yield views


def _copy(memory: NDArray[np.uint8], at: int, views: Sequence[memoryview], *, out: bool) -> None:
    """Copy between a part and views; numpy lets other threads run meanwhile."""
    for view in views:
        local = np.frombuffer(view, np.uint8)
        shared = memory[at : at + len(local)]
        np.copyto(*((local, shared) if out else (shared, local)))
        at += len(local)


def _receive_reports(connection: socket.socket, limit: int) -> int:
    """Return how many parts the other side reports, at least one."""
    reports = connection.recv(limit)
    if not reports:
        raise ProcessLost("the connection was closed in the middle of what follows a message")
    return len(reports)
