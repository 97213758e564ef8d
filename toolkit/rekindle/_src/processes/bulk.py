"""A channel on which many bytes may follow a message; they are received directly into their final memory.

A `sealed` channel ends them with a mark over all of them. Without it they are bare: over the loopback of one machine no
other process can add to a connection, and marking costs more time than moving (HMAC-SHA-256 does 1 to 2 GB/s on a
core). There they go through memory that both processes share, if the receiving one can open it.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from rekindle._src.processes.channel import Channel, Keys, exactly
from rekindle._src.processes.kinds import Kind
from rekindle._src.processes.shared_parts import ReceiveMemory, SendMemory
from rekindle.errors import ProcessLost

_AT_ONCE = 512  # pieces of one call; systems allow 1,024
_MARK = 32


class BulkChannel(Channel):
    """One side of a connection with bulk data. One thread uses it at a time."""

    def __init__(self, connection: socket.socket, keys: Keys, *, silence: float) -> None:
        super().__init__(connection, keys, silence=silence)
        self.sealed = not on_loopback(connection)
        self._offered: SendMemory | None = None  # memory that is offered
        self._outgoing: SendMemory | None = None  # the same, once the other side reads it
        self._incoming: ReceiveMemory | None = None

    def offer_memory(self) -> dict[str, Any] | None:
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

    def take_memory(self, offer: Any) -> bool:
        """True if this process can read the memory that the other side offers, which must then be notified."""
        if self.sealed or offer is None:
            return False
        try:
            self._incoming = ReceiveMemory(offer)
        except OSError:
            return False
        return True

    def send_followed(self, kind: Kind, content: bytes, pieces: Sequence[memoryview]) -> None:
        """Send a message and the pieces behind it. Raises ProcessLost if the connection is gone."""
        with self._sending:
            self._send(kind, content)
            try:
                if self._outgoing is not None:
                    self._outgoing.send(self._connection, pieces)
                else:
                    _send_all(self._connection, pieces)
                if self.sealed:
                    self._connection.sendall(_seal(self._keys.sending, self._sent, pieces))
            except OSError as error:
                raise ProcessLost(f"the connection broke: {error}") from error
        self.bytes_sent += sum(len(piece) for piece in pieces)

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """Fill the pieces with the bytes behind the latest received message. Raises ProcessLost if they don't come."""
        try:
            if self._incoming is not None:
                self._incoming.receive(self._connection, pieces)
            else:
                _receive_all(self._connection, pieces)
        except TimeoutError:
            raise ProcessLost(f"nothing came for {self._connection.gettimeout():g} s") from None
        except OSError as error:
            raise ProcessLost(f"the connection broke: {error}") from error
        if self.sealed:
            seal = exactly(self._connection, _MARK)
            if not hmac.compare_digest(seal, _seal(self._keys.receiving, self._received, pieces)):
                raise ProcessLost("what followed a message is not what the other process sent")

    def receive(self) -> tuple[Kind, bytes]:
        """Receive the next message, once the other side has read the bytes behind this side's messages."""
        if self._outgoing is not None:
            try:
                self._outgoing.finish(self._connection)
            except TimeoutError:
                raise ProcessLost(f"nothing came for {self._connection.gettimeout():g} s") from None
            except OSError as error:
                raise ProcessLost(f"the connection broke: {error}") from error
        return super().receive()

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
        count = connection.sendmsg(pending[at : at + _AT_ONCE])
        at = _advance(pending, at, count)


def _receive_all(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    pending = [piece for piece in pieces if len(piece)]
    at = 0
    while at < len(pending):
        count = connection.recvmsg_into(pending[at : at + _AT_ONCE])[0]
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
