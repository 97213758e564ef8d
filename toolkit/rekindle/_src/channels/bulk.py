"""A channel on which many bytes may follow a message; they are received directly into their final memory.

A `sealed` channel ends them with a mark over all of them. Without it they are bare: over the loopback of one machine no
other process can add to a connection, and marking costs more time than moving (HMAC-SHA-256 does 1 to 2 GB/s on a
core). There they go through memory that both processes share, if the receiving one can open it.

The sending side fills a part of that memory, and reports it by a byte on the connection; the receiving side copies it
out, and reports that by a byte back. So each byte is copied twice, at the speed of memory, and neither side waits for
the kernel. The memory is a file without a name (Linux), which the other process opens by the number of the process and
of the file. A random number at its beginning, repeated in a signed message, proves that it is the right one. It can't
shrink: reading beyond the end of a mapped file would kill the process.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.channels.channel import Channel, ChannelKeys, MessageKind, exactly
from rekindle.errors import ProcessLost
from rekindle_kernels import system

_AT_ONCE = 512  # pieces of one call; systems allow 1,024
_MARK = 32
PART, PARTS = 512 << 10, 8  # few enough to stay in the processor's caches
_RANDOM, FIRST = 32, mmap.PAGESIZE  # the parts begin after the number
SIZE = FIRST + PART * PARTS
_REPORT = b"\0"


class BulkChannel(Channel):
    """One side of a connection with bulk data. One thread uses it at a time."""

    def __init__(self, connection: socket.socket, keys: ChannelKeys, *, silence: float) -> None:
        super().__init__(connection, keys, silence=silence)
        self.sealed = not on_loopback(connection)
        self._offered: SendMemory | None = None  # memory that is offered
        self._outgoing: SendMemory | None = None  # the same, once the other side reads it
        self._incoming: ReceiveMemory | None = None

    def offer_memory(self) -> dict[str, object] | None:
        """Return an offer of memory for the bulk data that this side sends; None if there is none."""
        if self.sealed:
            return None
        try:
            self._offered = SendMemory()
        except OSError:
            return None
        return self._offered.offer()

    def pass_memory(self) -> None:
        """Use the offered memory, which the other side reads from now on. Raises ProcessLost if none was offered."""
        if self._offered is None:
            raise ProcessLost("the other process reads memory that was not offered")
        self._offered.close()
        self._outgoing = self._offered

    def take_memory(self, offer: object) -> bool:
        """True if this process can read the memory that the other side offers, which must then be notified."""
        if self.sealed or offer is None:
            return False
        try:
            self._incoming = ReceiveMemory(offer)
        except OSError:
            return False
        return True

    def send_followed(self, kind: MessageKind, content: bytes, pieces: Sequence[memoryview]) -> None:
        """Send a message and the pieces that follow it. Raises ProcessLost if the connection is gone."""
        with self._sending:
            self._send(kind, content)
            try:
                if self._outgoing is not None:
                    self._outgoing.send(self.connection, pieces)
                else:
                    _send_all(self.connection, pieces)
                if self.sealed:
                    self.connection.sendall(_seal(self._keys.sending, self._sent, pieces))
            except OSError as error:
                raise ProcessLost(f"the connection broke: {error}") from error
        self.bytes_sent += sum(len(piece) for piece in pieces)

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """Fill the pieces with the bytes after the latest received message. Raises ProcessLost if they don't come."""
        with self._losing():
            if self._incoming is not None:
                self._incoming.receive(self.connection, pieces)
            else:
                _receive_all(self.connection, pieces)
        if self.sealed:
            seal = exactly(self.connection, _MARK)
            if not hmac.compare_digest(seal, _seal(self._keys.receiving, self._received, pieces)):
                raise ProcessLost("the data after a message differs from what the other process sent")

    def receive(self) -> tuple[MessageKind, bytes]:
        """Receive the next message, once the other side has read the bytes that follow this side's messages."""
        if self._outgoing is not None:
            with self._losing():
                self._outgoing.finish(self.connection)
        return super().receive()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise ProcessLost(f"nothing came for {self.connection.gettimeout():g} s") from None
        except OSError as error:
            raise ProcessLost(f"the connection broke: {error}") from error

    def close(self) -> None:
        """Close the connection, and offer no memory any more."""
        if self._offered is not None:
            self._offered.close()
        super().close()


def on_loopback(connection: socket.socket) -> bool:
    """True if both ends of a connection are on this machine, according to its addresses."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return True  # a socket of this machine's file system
    try:
        ends = connection.getpeername()[0], connection.getsockname()[0]
        return all(ipaddress.ip_address(end.partition("%")[0]).is_loopback for end in ends)
    except (OSError, ValueError):
        return False


def _seal(key: bytes, number: int, pieces: Sequence[memoryview]) -> bytes:
    code = hmac.new(key, b"follows" + number.to_bytes(8, "little"), "sha256")
    for piece in pieces:
        code.update(piece)
    return code.digest()


def _send_all(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    pending = [piece for piece in pieces if len(piece)]
    at = 0
    while at < len(pending):
        count = system.send_views(connection, pending[at : at + _AT_ONCE])
        at = _advance(pending, at, count)


def _receive_all(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    pending = [piece for piece in pieces if len(piece)]
    at = 0
    while at < len(pending):
        count = system.receive_into(connection, pending[at : at + _AT_ONCE])
        if not count:
            raise ProcessLost("the connection was closed in the middle of what follows a message")
        at = _advance(pending, at, count)


def _advance(pending: list[memoryview], at: int, count: int) -> int:
    """Advance past `count` more bytes; returns the index of the first unfinished piece."""
    while at < len(pending) and count >= len(pending[at]):
        count -= len(pending[at])
        at += 1
    if count:
        pending[at] = pending[at][count:]
    return at


class SendMemory:
    """The memory of the sending side. Raises OSError on systems without it."""

    def __init__(self) -> None:
        self._number = secrets.token_bytes(_RANDOM)
        self._file = system.nameless_file(SIZE)
        try:
            mapped = mmap.mmap(self._file, SIZE)
        except BaseException:
            self.close()
            raise
        mapped[:_RANDOM] = self._number
        self._memory = np.frombuffer(mapped, np.uint8)[FIRST:]
        self._filled = self._emptied = 0  # parts, since the beginning

    def offer(self) -> dict[str, Any]:
        """Return an offer with which the other side finds the memory, for a signed message."""
        return {"process": os.getpid(), "file": self._file, "number": self._number.hex(), "size": SIZE}

    def close(self) -> None:
        """Close the file, so that no other process can open it; existing mappings stay."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def send(self, connection: socket.socket, pieces: Sequence[memoryview]) -> None:
        """Send the bytes of all pieces. Raises OSError if the connection is gone."""
        for views in _cut(pieces):
            if self._filled - self._emptied == PARTS:
                self._emptied += _receive_reports(connection, PARTS)
            _copy(self._memory, self._filled % PARTS * PART, views, out=False)
            self._filled += 1
            connection.sendall(_REPORT)

    def finish(self, connection: socket.socket) -> None:
        """Wait until the other side has copied all parts; its next message comes after that."""
        while self._filled != self._emptied:
            self._emptied += _receive_reports(connection, self._filled - self._emptied)


class ReceiveMemory:
    """The memory of the sending side in the receiving process, read-only."""

    def __init__(self, offer: Any) -> None:
        """Map the offered memory. Raises OSError if this process can't open it, or if it might shrink."""
        process, file, number = _parse_offer(offer)
        descriptor = system.open_nameless(process, file, SIZE)
        try:
            mapped = mmap.mmap(descriptor, SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        if not secrets.compare_digest(mapped[:_RANDOM], number):
            raise OSError("it is another one")
        self._memory = np.frombuffer(mapped, np.uint8)[FIRST:]
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
        if type(process) is int and type(file) is int and isinstance(number, str) and offer.get("size") == SIZE:
            with contextlib.suppress(ValueError):
                content = bytes.fromhex(number)
                if len(content) == _RANDOM:
                    return process, file, content
    raise OSError("the offer of shared memory is invalid")


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
