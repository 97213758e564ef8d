"""A connection between two processes: typed, numbered and signed messages over TCP.

    header    kind, length and number of the message      16 bytes
    its mark  HMAC of the header                           16 bytes
    content   `length` bytes, at most `kind.limit`
    mark      HMAC of header and content                   32 bytes

Each direction has a key of its own, which the greeting derives from the shared secret and from random numbers of both
sides, and counts its messages. So a message that was changed, repeated, left out, reordered, or sent back to its sender
is refused, and so is a recording of another connection. Nothing is encrypted.

The kinds of messages of a session:

    leader → follower                                   follower → leader
    WELCOME       the session's options and model       FACTS     facts that must be the same everywhere
    AGREED        values that all processes agreed on   LOADED    programs and weights are there
    PREPARE       make a program ready                  READY     it is ready
    STEP … RENEW  calls of programs, in their order     DONE      a step's tokens, as a checksum
    KEEP          a page's part for host memory
    READ          pages to be read from disk            HAVE      the parts of them that are there
    STORE         pages, to write their parts
    FORGET        parts on disk are to be removed
    DROP          pages that leave host memory
    FETCH         a page that is needed whole           PART      the part of it that is there
    LOAD_WEIGHTS  read other weights                    WEIGHTS   their fingerprint, or the error
    TAKE_WEIGHTS  and use them; DROP_WEIGHTS: don't
    PING          still there                           PING      still there
    CLOSE         the session ends                      FAILED    the reason why it can't go on

Between sessions that share pages, which are no team:

    caller → sharer                                     sharer → caller
    IDENTITY      the identity of its pages             IDENTITY  the same, and memory to share; FAILED: the difference
    MAPPED        it reads that memory
    LIST          how many pages it has room for        LISTED    an index of the likeliest
    WANT          digests and keys of pages             PAGES     pages follow the message; SENT: no more
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import json
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple, Self

from rekindle.errors import ProcessLost

_HEADER = struct.Struct("<BxxxIQ")
_SHORT, _MARK = 16, 32
_JOINED = 64 << 10  # shorter contents are sent in one piece with header and marks
_KIB, _MIB = 1 << 10, 1 << 20


class MessageKind(enum.IntEnum):
    """The kind of a message: its number, which is part of the protocol, and the most bytes of its content.

    Nothing is allocated for a longer one.
    """

    limit: int

    def __new__(cls, number: int, limit: int = 0) -> Self:
        kind = int.__new__(cls, number)
        kind._value_, kind.limit = number, limit
        return kind

    PING = 1, 0
    CLOSE = 2, 0
    FAILED = 3, 64 * _KIB
    WELCOME = 4, _MIB
    FACTS = 5, _MIB
    AGREED = 6, _MIB
    LOADED = 7, 0
    PREPARE = 8, 64
    READY = 9, 64 * _KIB
    STEP = 10, 64 * _MIB
    CHOOSE = 11, 64 * _MIB
    ADMIT = 12, 16 * _MIB
    GATHER = 13, _KIB
    SCATTER = 14, _KIB
    RENEW = 15, 0
    DONE = 16, 16
    LOAD_WEIGHTS = 17, 64 * _KIB
    WEIGHTS = 18, 64 * _KIB
    TAKE_WEIGHTS = 19, 0
    DROP_WEIGHTS = 20, 0
    IDENTITY = 21, 64 * _KIB
    LIST = 22, 8
    LISTED = 23, 64 * _MIB
    WANT = 24, 4 * _MIB
    PAGES = 25, _MIB
    SENT = 26, 0
    MAPPED = 27, 0
    COLLECT = 28, _KIB
    KEEP = 29, 1 << 30
    DROP = 30, _MIB
    FETCH = 31, 64
    PART = 32, 1 << 30
    READ = 33, 64 * _MIB
    HAVE = 34, 64 * _MIB
    STORE = 35, 64 * _MIB
    FORGET = 36, 0
    COPY = 37, _KIB


class ChannelKeys(NamedTuple):
    sending: bytes
    receiving: bytes


def mark(key: bytes, *parts: bytes | memoryview) -> bytes:
    if len(parts) == 1:
        return hmac.digest(key, parts[0], "sha256")
    code = hmac.new(key, digestmod="sha256")
    for part in parts:
        code.update(part)
    return code.digest()


class Channel:
    """One side of a connection after the greeting. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, keys: ChannelKeys, *, silence: float) -> None:
        """Wrap a connection. The other side counts as gone after `silence` seconds without a message."""
        self.connection, self._keys = connection, keys
        self._sent = self._received = 0
        self._sending = threading.Lock()
        self.bytes_sent = 0
        connection.settimeout(silence)
        with contextlib.suppress(OSError):  # not TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: MessageKind, content: bytes = b"") -> None:
        """Send a message; waits while the other side does not read. Raises ProcessLost if the connection is gone."""
        with self._sending:
            self._send(kind, content)

    def ping(self) -> None:
        """Send a sign of life, unless another message is being sent anyway."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(MessageKind.PING, b"")
            finally:
                self._sending.release()

    def _send(self, kind: MessageKind, content: bytes) -> None:
        if len(content) > kind.limit:
            raise ProcessLost(f"a {kind.name} message of {len(content):,} bytes is longer than {kind.limit:,}")
        header = _HEADER.pack(kind, len(content), self._sent)
        before, after = header + mark(self._keys.sending, header)[:_SHORT], mark(self._keys.sending, header, content)
        try:
            if len(content) <= _JOINED:
                self.connection.sendall(before + content + after)
            else:
                for part in (before, content, after):
                    self.connection.sendall(part)
        except OSError as error:
            raise ProcessLost(f"the connection broke: {error}") from error
        self._sent += 1
        self.bytes_sent += len(before) + len(content) + len(after)

    def receive(self) -> tuple[MessageKind, bytes]:
        """Receive the next message, skipping pings. Raises ProcessLost if it is forged, or none comes."""
        while (message := self._receive())[0] is MessageKind.PING:
            pass
        return message

    def _receive(self) -> tuple[MessageKind, bytes]:
        first = self._exactly(_HEADER.size + _SHORT)
        header = bytes(first[: _HEADER.size])
        if not hmac.compare_digest(mark(self._keys.receiving, header)[:_SHORT], first[_HEADER.size :]):
            raise ProcessLost("a message came that the other process did not sign")
        number, length, count = _HEADER.unpack(header)
        if count != self._received:
            raise ProcessLost(f"message {count} came in place of message {self._received}")
        try:
            kind = MessageKind(number)
        except ValueError:
            raise ProcessLost(f"a message of the unknown kind {number} came") from None
        if length > kind.limit:
            raise ProcessLost(f"a {kind.name} message of {length:,} bytes came, {kind.limit:,} are allowed")
        rest = self._exactly(length + _MARK)
        content = bytes(rest[:length])
        if not hmac.compare_digest(mark(self._keys.receiving, header, content), rest[length:]):
            raise ProcessLost(f"a {kind.name} message came that the other process did not sign")
        self._received += 1
        return kind, content

    def close(self) -> None:
        """Close the connection; a thread that sends or receives gets ProcessLost."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _exactly(self, count: int) -> memoryview:
        return exactly(self.connection, count)


def exactly(connection: socket.socket, count: int, *, deadline: float | None = None) -> memoryview:
    """Receive the next `count` bytes. Raises ProcessLost if they don't come.

    Without a `deadline`, a time of `time.monotonic()` for all of them, each wait has the connection's own timeout.
    """
    buffer = memoryview(bytearray(count))
    at = 0
    while at < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ProcessLost(f"{at} of {count} bytes of a message came in time")
            connection.settimeout(left)
        try:
            received = connection.recv_into(buffer[at:])
        except TimeoutError:
            raise ProcessLost(f"nothing came for {connection.gettimeout():g} s") from None
        except OSError as error:
            raise ProcessLost(f"the connection broke: {error}") from error
        if not received:
            progress = f" after {at} of {count} bytes of a message" if at else ""
            raise ProcessLost(f"the connection was closed{progress}")
        at += received
    return buffer


def as_json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, default=str).encode()


def from_json(content: bytes) -> dict[str, object]:
    """Parse the JSON object of a message. Raises ProcessLost if it holds none."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ProcessLost("a message holds no JSON object")
    return fields
