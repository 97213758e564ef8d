"""A channel on which many bytes may follow a message; they are received straight to where they belong.

A `sealed` channel ends them with a mark over all of them. Without it they are bare: over the loopback of one machine
nobody else can add to a connection, and marking costs more time than moving (HMAC-SHA-256 does 1 to 2 GB/s on a core).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Sequence

from rekindle._src.processes.channel import Channel, Keys, exactly
from rekindle._src.processes.kinds import Kind
from rekindle.errors import ProcessLost

_AT_ONCE = 512  # pieces of one call; systems allow 1,024
_MARK = 32


class BulkChannel(Channel):
    """One side of such a connection. One thread uses it at a time."""

    def __init__(self, connection: socket.socket, keys: Keys, *, silence: float) -> None:
        super().__init__(connection, keys, silence=silence)
        self.sealed = not on_loopback(connection)

    def send_followed(self, kind: Kind, content: bytes, pieces: Sequence[memoryview]) -> None:
        """Send a message and the pieces behind it. Raises ProcessLost if the connection is gone."""
        with self._sending:
            self._send(kind, content)
            try:
                _send_all(self._connection, pieces)
                if self.sealed:
                    self._connection.sendall(_seal(self._keys.sending, self._sent, pieces))
            except OSError as error:
                raise ProcessLost(f"the connection broke: {error}") from error
        self.bytes_sent += sum(len(piece) for piece in pieces)

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """Fill the pieces with what follows the message that was received last. Raises ProcessLost if it does not."""
        try:
            _receive_all(self._connection, pieces)
        except TimeoutError:
            raise ProcessLost(f"nothing came for {self._connection.gettimeout():g} s") from None
        except OSError as error:
            raise ProcessLost(f"the connection broke: {error}") from error
        if self.sealed:
            seal = exactly(self._connection, _MARK)
            if not hmac.compare_digest(seal, _seal(self._keys.receiving, self._received, pieces)):
                raise ProcessLost("what followed a message is not what the other process sent")


def on_loopback(connection: socket.socket) -> bool:
    """Whether both ends of a connection are on this machine, as far as its addresses tell."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return True  # a socket of this machine's file system
    try:
        ends = connection.getpeername()[0], connection.getsockname()[0]
        return all(ipaddress.ip_address(end.partition("%")[0]).is_loopback for end in ends)
    except (OSError, ValueError):
        return False


def _seal(key: bytes, number: int, pieces: Sequence[memoryview]) -> bytes:
    made = hmac.new(key, b"follows" + number.to_bytes(8, "little"), "sha256")
    for piece in pieces:
        made.update(piece)
    return made.digest()


def _send_all(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    todo = [piece for piece in pieces if len(piece)]
    at = 0
    while at < len(todo):
        done = connection.sendmsg(todo[at : at + _AT_ONCE])
        at = _passed(todo, at, done)


def _receive_all(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    todo = [piece for piece in pieces if len(piece)]
    at = 0
    while at < len(todo):
        done = connection.recvmsg_into(todo[at : at + _AT_ONCE])[0]
        if not done:
            raise ProcessLost("the connection was closed in the middle of what follows a message")
        at = _passed(todo, at, done)


def _passed(todo: list[memoryview], at: int, done: int) -> int:
    """Where to go on after `done` more bytes."""
    while at < len(todo) and done >= len(todo[at]):
        done -= len(todo[at])
        at += 1
    if done:
        todo[at] = todo[at][done:]
    return at
