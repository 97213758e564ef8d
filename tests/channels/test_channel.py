"""Connections of processes: without the secret there is none, and no message is taken that was changed or repeated."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from channels.together import together
from rekindle._src.channels import greeting
from rekindle._src.channels.channel import Channel, ChannelKeys, MessageKind
from rekindle._src.channels.greeting import MAGIC, ProcessPlace
from rekindle.errors import ConfigError, ProcessLost, ProcessRefused

SECRET, OTHER = b"0123456789abcdef", b"fedcba9876543210"
FIRST = ProcessPlace(1, 2)
KEYS = ChannelKeys(b"a" * 32, b"b" * 32)


class Wire(NamedTuple):
    """A channel, and the bare other end of its connection."""

    channel: Channel
    bare: socket.socket


@pytest.fixture
def wire() -> Iterator[Wire]:
    near, far = socket.socketpair()
    far.settimeout(5)
    with near, far:
        yield Wire(Channel(near, KEYS, silence=60), far)


def recorded(*messages: tuple[MessageKind, bytes]) -> list[bytes]:
    """The bytes of messages to the `wire`."""
    near, far = socket.socketpair()
    far.settimeout(5)
    found = []
    with near, far:
        sender = Channel(near, ChannelKeys(KEYS.receiving, KEYS.sending), silence=60)
        for message in messages:
            sender.send(*message)
            found.append(far.recv(1 << 16))
    return found


def met(
    follower: ProcessPlace = FIRST, secret: bytes = SECRET, taken: frozenset[int] = frozenset()
) -> tuple[Any, Any, socket.socket, socket.socket]:
    near, far = socket.socketpair()
    lead = lambda: greeting.lead(near, SECRET, ProcessPlace(0, 2), taken, silence=60)  # noqa: E731
    follow = lambda: greeting.follow(far, secret, follower, silence=60)  # noqa: E731
    return (*together(lead, follow), near, far)


def test_both_sides_greet_and_talk() -> None:
    (process, leader), follower, near, far = met()
    with near, far:
        assert process == 1
        _, found = together(lambda: leader.send(MessageKind.STEP, b"x" * 100_000), follower.receive)
        assert found == (MessageKind.STEP, b"x" * 100_000)
        leader.ping()
        leader.send(MessageKind.RENEW)
        assert follower.receive() == (MessageKind.RENEW, b""), "pings are no news"
        follower.send(MessageKind.DONE, b"yes")
        assert leader.receive() == (MessageKind.DONE, b"yes")
        assert leader.bytes_sent == 100_000 + 3 * 64


@pytest.mark.parametrize(
    ("options", "there", "here"),
    [
        ({"secret": OTHER}, "another secret", "does not know the secret"),
        ({"follower": ProcessPlace(1, 3)}, "another number of processes", "does not fit"),
        ({"follower": ProcessPlace(2, 2)}, "another number of processes", "does not fit"),
        ({"follower": ProcessPlace(0, 2)}, "another number of processes", "does not fit"),
        ({"taken": frozenset({1})}, "another process of this number", "has joined already"),
    ],
)
def test_who_may_not_join_is_told_why(options: dict[str, Any], there: str, here: str) -> None:
    leader, follower, near, far = met(**options)
    with near, far:
        assert isinstance(leader, ProcessRefused) and here in str(leader)
        assert isinstance(follower, ProcessRefused) and there in str(follower)


def test_a_leader_without_the_secret_is_found_out() -> None:
    near, far = socket.socketpair()
    with near, far:

        def lead() -> None:
            near.sendall(MAGIC + bytes(32))
            near.recv(1 << 10)
            near.sendall(b"\0" + bytes(32))

        _, refused = together(lead, lambda: greeting.follow(far, SECRET, ProcessPlace(1, 2), silence=60))
        assert isinstance(refused, ProcessRefused) and "the leader does not know the secret" in str(refused)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200, bytes(200), b""])
def test_noise_in_place_of_a_greeting_is_refused(noise: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(noise)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises((ProcessRefused, ProcessLost)):
            greeting.lead(near, SECRET, ProcessPlace(0, 2), frozenset(), silence=60)


def test_what_was_recorded_of_one_connection_opens_no_other() -> None:
    """The greeting of a follower, sent again to a leader that has drawn another number."""
    near, far = socket.socketpair()
    with near, far:
        _, said = together(
            lambda: greeting.lead(near, SECRET, ProcessPlace(0, 2), frozenset(), silence=60),
            lambda: (far.recv(1 << 10), far.sendall(MAGIC + bytes(32) + struct.pack("<HH", 1, 2) + bytes(32))),
        )
        assert not isinstance(said, Exception)
        assert far.recv(1) == bytes([greeting.LeaderAnswer.SECRET])


class Trickle:
    """A connection whose other side sends one byte every five seconds, by the clock of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.bytes, self.timeout = 1000.0, 0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def gettimeout(self) -> float:
        return self.timeout

    def sendall(self, content: bytes) -> None: ...

    def recv_into(self, buffer: memoryview) -> int:
        self.now += min(5.0, self.timeout)
        if self.timeout < 5.0:
            raise TimeoutError
        buffer[0], self.bytes = 0, self.bytes + 1
        return 1


@pytest.mark.parametrize(
    "greet",
    [
        lambda connection: greeting.lead(connection, SECRET, ProcessPlace(0, 2), frozenset(), silence=60),
        lambda connection: greeting.follow(connection, SECRET, ProcessPlace(1, 2), silence=60),
        lambda connection: greeting.listen(connection, SECRET),
        lambda connection: greeting.call(connection, SECRET),
    ],
)
def test_a_greeting_has_one_deadline(greet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte every five seconds kept a greeting going for minutes: the time began again with each."""
    connection = Trickle(monkeypatch)
    with pytest.raises(ProcessLost):
        greet(connection)
    assert connection.bytes <= 2 and connection.now <= 1000.0 + greeting.GREETING_SECONDS


def test_of_pending_connections_the_oldest_of_the_most_crowded_address_leaves() -> None:
    pending = greeting.PendingConnections(4)
    pairs = [socket.socketpair() for _ in range(6)]
    try:
        for (near, _), host in zip(pairs, ("rightful", "a", "a", "b", "a", "b"), strict=True):
            pending.enter(near, host)
        assert len(pending) == 4
        assert [pending.leave(near) for near, _ in pairs] == [True, False, False, True, True, True]
        for _, far in pairs[1:3]:
            assert far.recv(1) == b"", "it was shut down"
        assert len(pending) == 0
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def test_a_changed_message_is_refused(wire: Wire) -> None:
    (whole,) = recorded((MessageKind.STEP, b"tokens"))
    for at in range(len(whole)):
        near, far = socket.socketpair()
        with near, far:
            channel = Channel(near, KEYS, silence=60)
            far.sendall(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ProcessLost, match="did not sign"):
                channel.receive()
    wire.bare.sendall(whole)
    assert wire.channel.receive() == (MessageKind.STEP, b"tokens")


def test_a_repeated_message_is_refused(wire: Wire) -> None:
    first, second = recorded((MessageKind.STEP, b"one"), (MessageKind.STEP, b"two"))
    wire.bare.sendall(first + first)
    assert wire.channel.receive() == (MessageKind.STEP, b"one")
    with pytest.raises(ProcessLost, match="message 0 came in place of message 1"):
        wire.channel.receive()
    assert second != first


def test_a_message_that_was_left_out_is_noticed(wire: Wire) -> None:
    _, second = recorded((MessageKind.STEP, b"one"), (MessageKind.STEP, b"two"))
    wire.bare.sendall(second)
    with pytest.raises(ProcessLost, match="message 1 came in place of message 0"):
        wire.channel.receive()


def test_a_message_that_comes_back_to_its_sender_is_refused(wire: Wire) -> None:
    wire.channel.send(MessageKind.STEP, b"one")
    wire.bare.sendall(wire.bare.recv(1 << 10))
    with pytest.raises(ProcessLost, match="did not sign"):
        wire.channel.receive()


def test_a_message_that_is_cut_is_noticed(wire: Wire) -> None:
    (whole,) = recorded((MessageKind.STEP, b"tokens"))
    wire.bare.sendall(whole[:-1])
    wire.bare.close()
    with pytest.raises(ProcessLost, match="closed after 37 of 38 bytes"):
        wire.channel.receive()


def test_no_length_is_believed_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of one who signs: nothing is allocated for it."""
    with monkeypatch.context() as patch:
        patch.setattr(MessageKind.PREPARE, "limit", 1 << 20)
        (whole,) = recorded((MessageKind.PREPARE, b"x" * 500))
    near, far = socket.socketpair()
    with near, far:
        far.sendall(whole)
        with pytest.raises(ProcessLost, match="PREPARE message of 500 bytes came, 64 are allowed"):
            Channel(near, KEYS, silence=60).receive()
        with pytest.raises(ProcessLost, match="longer than 64"):
            Channel(near, KEYS, silence=60).send(MessageKind.PREPARE, b"x" * 65)


def test_silence_ends_a_connection() -> None:
    near, far = socket.socketpair()
    with near, far, pytest.raises(ProcessLost, match=r"nothing came for 0\.05 s"):
        Channel(near, KEYS, silence=0.05).receive()


def test_a_secret_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv(greeting.SECRET, raising=False)
    monkeypatch.delenv(greeting.SECRET_FILE, raising=False)
    with pytest.raises(ConfigError, match="has 0 characters, and 16 are the least"):
        greeting.secret()
    monkeypatch.setenv(greeting.SECRET, "short")
    with pytest.raises(ConfigError, match="has 5 characters") as refused:
        greeting.secret()
    assert "short" not in str(refused.value)
    monkeypatch.delenv(greeting.SECRET)
    monkeypatch.setenv(greeting.SECRET_FILE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="can't be read"):
        greeting.secret()
    (tmp_path / "some").write_text("0123456789abcdef\n")
    monkeypatch.setenv(greeting.SECRET_FILE, str(tmp_path / "some"))
    assert greeting.secret() == b"0123456789abcdef"
