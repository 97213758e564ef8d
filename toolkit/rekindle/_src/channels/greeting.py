"""The greeting of a connection: both sides prove that they know the secret, and derive the connection's keys.

Between the processes of a session:

    leader    MAGIC  its random number
    follower  MAGIC  its random number  its process  process count  HMAC(secret, "follower" and all of these)
    leader    a `LeaderAnswer`  HMAC(secret, "leader" and all of these), if the answer is WELCOME

Between sessions that share pages, and nothing else but a secret:

    listener  PAGES_MAGIC  its random number
    caller    PAGES_MAGIC  its random number  HMAC(secret, "caller" and both)
    listener  1            HMAC(secret, "listener" and both); or 0, and the connection ends

Messages have a fixed length until both have proved themselves, and all of a greeting has one deadline. Until then a
connection has one of a few places, which a later one may take (`PendingConnections`). The secret itself is never sent.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rekindle._src.channels.channel import Channel, ChannelKeys, exactly, mark
from rekindle.errors import ConfigError, ProcessLost, ProcessRefused

MAGIC = b"rekindle processes 1\n"
PAGES_MAGIC = b"rekindle pages 1\n"
SECRET, SECRET_FILE = "REKINDLE_PROCESS_SECRET", "REKINDLE_PROCESS_SECRET_FILE"
SHORTEST_SECRET = 16
GREETING_SECONDS = 10.0  # for all messages of a greeting
_RANDOM, _PROOF = 32, 32
_PLACE = struct.Struct("<HH")


class ProcessPlace(NamedTuple):
    """A process's number, and the number of processes; 0 is the leader."""

    process: int
    processes: int


class LeaderAnswer(enum.IntEnum):
    """The answer of a leader to a follower."""

    WELCOME = 0
    SECRET = 1
    COUNT = 2
    TAKEN = 3


_WORDS = {
    LeaderAnswer.SECRET: f"it has another secret. Give both the same {SECRET}",
    LeaderAnswer.COUNT: "it shares its model among another number of processes. Pass the same --processes",
    LeaderAnswer.TAKEN: "it has another process of this number already. Number the followers from 1",
}
_REFUSALS = {
    LeaderAnswer.SECRET: f"it does not know the secret. Give all processes the same {SECRET}",
    LeaderAnswer.COUNT: "its --process or --processes does not fit this session",
    LeaderAnswer.TAKEN: "its number has joined already",
}


def secret() -> bytes:
    """Return the secret that leader and followers share. Raises ConfigError if there is none."""
    text, path = os.environ.get(SECRET, ""), os.environ.get(SECRET_FILE, "")
    if path and not text:
        try:
            text = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(SECRET_FILE, path, f"can't be read: {error}", "Check the path") from None
    if len(text) < SHORTEST_SECRET:
        raise ConfigError(
            SECRET if text or not path else SECRET_FILE,
            "a secret" if text else "",
            f"has {len(text)} characters, and {SHORTEST_SECRET} are the least: processes prove with it who they are",
            'Make one with python -c "import secrets; print(secrets.token_hex(32))", and give all processes the same',
        )
    return text.encode()


def checked_secret(text: str | None) -> bytes:
    """Return a caller's secret, or else the secret of the environment, as bytes. Raises ConfigError for a short one."""
    if text is None:
        return secret()
    if not isinstance(text, str) or len(text) < SHORTEST_SECRET:
        problem = f"is no text of at least {SHORTEST_SECRET} characters"
        raise ConfigError("secret", "a secret", problem, "Use secrets.token_hex(32)")
    return text.encode()


def lead(
    connection: socket.socket, key: bytes, place: ProcessPlace, joined: frozenset[int], *, silence: float
) -> tuple[int, Channel]:
    """Greet a follower; returns its number and the channel to it. Raises ProcessRefused for one that may not join."""
    deadline = _deadline(connection)
    leader_random = secrets.token_bytes(_RANDOM)
    _send(connection, MAGIC + leader_random)
    message = bytes(exactly(connection, len(MAGIC) + _RANDOM + _PLACE.size + _PROOF, deadline=deadline))
    greeting, proof = message[:-_PROOF], message[-_PROOF:]
    follower_random = greeting[len(MAGIC) : len(MAGIC) + _RANDOM]
    claimed, answer = ProcessPlace(*_PLACE.unpack(greeting[-_PLACE.size :])), LeaderAnswer.WELCOME
    if not (greeting.startswith(MAGIC) and hmac.compare_digest(proof, mark(key, b"follower", leader_random, greeting))):
        answer = LeaderAnswer.SECRET
    elif claimed.processes != place.processes or not 0 < claimed.process < place.processes:
        answer = LeaderAnswer.COUNT
    elif claimed.process in joined:
        answer = LeaderAnswer.TAKEN
    if answer is not LeaderAnswer.WELCOME:
        _send(connection, bytes([answer]))
        raise ProcessRefused(f"a process was refused: {_REFUSALS[answer]}")
    _send(connection, bytes([answer]) + mark(key, b"leader", leader_random, greeting))
    keys = _keys(key, b"leader", b"follower", leader_random, follower_random)
    return claimed.process, Channel(connection, keys, silence=silence)


def follow(connection: socket.socket, key: bytes, place: ProcessPlace, *, silence: float) -> Channel:
    """Greet the leader. Raises ProcessRefused, with its answer, if this process may not join."""
    deadline = _deadline(connection)
    message = bytes(exactly(connection, len(MAGIC) + _RANDOM, deadline=deadline))
    if not message.startswith(MAGIC):
        raise ProcessRefused(
            "what answers there is no leader of this version of rekindle. Check --coordinator, and install one version"
        )
    leader_random, follower_random = message[len(MAGIC) :], secrets.token_bytes(_RANDOM)
    greeting = MAGIC + follower_random + _PLACE.pack(*place)
    _send(connection, greeting + mark(key, b"follower", leader_random, greeting))
    answer = exactly(connection, 1, deadline=deadline)[0]
    if answer != LeaderAnswer.WELCOME:
        known = answer in list(LeaderAnswer)
        raise ProcessRefused(f"the leader refused: {_WORDS[LeaderAnswer(answer)] if known else f'answer {answer}'}")
    if not hmac.compare_digest(
        exactly(connection, _PROOF, deadline=deadline), mark(key, b"leader", leader_random, greeting)
    ):
        raise ProcessRefused(f"the leader does not know the secret. Give all processes the same {SECRET}")
    keys = _keys(key, b"follower", b"leader", leader_random, follower_random)
    return Channel(connection, keys, silence=silence)


def listen(connection: socket.socket, secret: bytes) -> ChannelKeys:
    """Greet a process that has connected. Return the keys of this side. Raises ProcessRefused without the secret."""
    deadline = _deadline(connection)
    listener_random = secrets.token_bytes(_RANDOM)
    _send(connection, PAGES_MAGIC + listener_random)
    message = bytes(exactly(connection, len(PAGES_MAGIC) + _RANDOM + _PROOF, deadline=deadline))
    caller_random, proof = message[len(PAGES_MAGIC) : -_PROOF], message[-_PROOF:]
    expected = mark(secret, b"caller", listener_random, caller_random)
    if not (message.startswith(PAGES_MAGIC) and hmac.compare_digest(proof, expected)):
        _send(connection, bytes([0]) + bytes(_PROOF))
        raise ProcessRefused("a process was refused that does not know the secret")
    _send(connection, bytes([1]) + mark(secret, b"listener", listener_random, caller_random))
    return _keys(secret, b"listener", b"caller", listener_random, caller_random)


def call(connection: socket.socket, secret: bytes) -> ChannelKeys:
    """Greet the listener; returns the keys of this side. Raises ProcessRefused if either does not know the secret."""
    deadline = _deadline(connection)
    message = bytes(exactly(connection, len(PAGES_MAGIC) + _RANDOM, deadline=deadline))
    if not message.startswith(PAGES_MAGIC):
        raise ProcessRefused(
            "what answers there shares no pages as this version of rekindle does. Check the address, and install one "
            "version"
        )
    listener_random, caller_random = message[len(PAGES_MAGIC) :], secrets.token_bytes(_RANDOM)
    _send(connection, PAGES_MAGIC + caller_random + mark(secret, b"caller", listener_random, caller_random))
    answer = bytes(exactly(connection, 1 + _PROOF, deadline=deadline))
    if answer[0] != 1:
        raise ProcessRefused("it has another secret. Give both sessions the same one")
    if not hmac.compare_digest(answer[1:], mark(secret, b"listener", listener_random, caller_random)):
        raise ProcessRefused("what answers there does not know the secret. Give both sessions the same one")
    return _keys(secret, b"caller", b"listener", listener_random, caller_random)


class PendingConnections:
    """The connections still in their greeting. If there are too many, an old one is closed, not the new one.

    So connections that never speak keep no rightful one out: the oldest connection of the address with the most is
    closed. Any thread may use it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hosts: dict[socket.socket, str] = {}  # of the other side, the oldest connection first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._hosts)

    def enter(self, connection: socket.socket, host: str) -> None:
        """Give a connection from `host` a place. Shut another one down if none is free."""
        with self._lock:
            crowded = None
            if len(self._hosts) >= self._most:
                most_of_one = Counter(self._hosts.values()).most_common(1)[0][0]
                crowded = next(other for other, its in self._hosts.items() if its == most_of_one)
                del self._hosts[crowded]
            self._hosts[connection] = host
        if crowded is not None:
            _shut(crowded)

    def leave(self, connection: socket.socket) -> bool:
        """Free the place of a connection after its greeting. Return False if another one has taken it."""
        with self._lock:
            return self._hosts.pop(connection, None) is not None

    def close(self) -> None:
        """Shut all of them down."""
        with self._lock:
            pending = list(self._hosts)
            self._hosts.clear()
        for connection in pending:
            _shut(connection)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # its thread closes it


def _deadline(connection: socket.socket) -> float:
    connection.settimeout(GREETING_SECONDS)
    return time.monotonic() + GREETING_SECONDS


def _send(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError as error:
        raise ProcessLost(f"the connection broke: {error}") from error


def _keys(key: bytes, own: bytes, other: bytes, *randoms: bytes) -> ChannelKeys:
    return ChannelKeys(mark(key, b"to the " + other, *randoms), mark(key, b"to the " + own, *randoms))
