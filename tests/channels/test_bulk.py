"""Messages followed by many bytes: refused without the secret, and what is sealed is not changed."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from channels.together import together
from rekindle._src.channels import greeting
from rekindle._src.channels.bulk import BulkChannel, on_loopback
from rekindle._src.channels.channel import ChannelKeys, MessageKind
from rekindle.errors import ProcessLost, ProcessRefused

SECRET, OTHER = b"0123456789abcdef", b"fedcba9876543210"
KEYS = ChannelKeys(b"a" * 32, b"b" * 32)


def greeted(secret: bytes) -> list[Any]:
    near, far = socket.socketpair()
    with near, far:
        return together(lambda: greeting.listen(near, SECRET), lambda: greeting.call(far, secret))


def channels(*, sealed: bool) -> tuple[BulkChannel, BulkChannel]:
    near, far = socket.socketpair()
    one, two = (
        BulkChannel(near, KEYS, silence=60),
        BulkChannel(far, ChannelKeys(KEYS.receiving, KEYS.sending), silence=60),
    )
    one.sealed = two.sealed = sealed
    return one, two


def test_both_sides_have_the_same_keys() -> None:
    listener, caller = greeted(SECRET)
    assert (listener.sending, listener.receiving) == (caller.receiving, caller.sending)
    assert listener.sending != listener.receiving
    assert greeted(SECRET)[0] != listener


def test_without_the_secret_both_sides_refuse() -> None:
    listener, caller = greeted(OTHER)
    assert isinstance(listener, ProcessRefused) and isinstance(caller, ProcessRefused)
    assert "secret" in str(caller)


def test_a_listener_that_only_pretends_is_refused() -> None:
    near, far = socket.socketpair()

    def pretend() -> None:
        near.sendall(greeting.PAGES_MAGIC + bytes(32))
        near.recv(1000)
        near.sendall(bytes([1]) + bytes(32))

    with near, far:
        found = together(pretend, lambda: greeting.call(far, SECRET))[1]
    assert isinstance(found, ProcessRefused) and "does not know the secret" in str(found)


@pytest.mark.parametrize("sealed", [False, True])
def test_what_follows_arrives_where_it_belongs(sealed: bool) -> None:
    one, two = channels(sealed=sealed)
    pieces = [bytes([number % 251]) * (number * 37 % 5000) for number in range(1500)]
    slots = [bytearray(len(piece)) for piece in pieces]

    def receive() -> tuple[Any, Any]:
        first = two.receive()
        two.receive_into([memoryview(slot) for slot in slots])
        return first, two.receive()

    def send() -> None:
        one.send_followed(MessageKind.PAGES, b"abcd", [memoryview(piece) for piece in pieces])
        one.send(MessageKind.SENT)

    _, found = together(send, receive)
    assert found == ((MessageKind.PAGES, b"abcd"), (MessageKind.SENT, b""))
    assert slots == pieces
    one.close(), two.close()


def test_what_is_sealed_can_not_be_changed() -> None:
    one, two = channels(sealed=True)
    one.send_followed(MessageKind.PAGES, b"", [memoryview(b"x" * 1000)])
    two.connection.recv(16 + 16 + 32)  # the message
    data = bytearray(two.connection.recv(2000))
    data[500] ^= 1
    near, far = socket.socketpair()
    near.sendall(data)
    two.close()
    two.connection, two._received = far, 1
    with pytest.raises(ProcessLost, match="differs from what the other process sent"):
        two.receive_into([memoryview(bytearray(1000))])
    near.close(), one.close(), two.close()


def test_a_connection_that_ends_amid_it_is_lost() -> None:
    one, two = channels(sealed=False)
    one.connection.sendall(b"x" * 10)
    one.close()
    with pytest.raises(ProcessLost, match="in the middle"):
        two.receive_into([memoryview(bytearray(1000))])
    two.close()


def test_only_the_loopback_goes_without_a_seal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        assert on_loopback(far)

    class Elsewhere:
        family = socket.AF_INET

        def getpeername(self) -> tuple[str, int]:
            return "10.0.0.1", 1

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", 1

    assert not on_loopback(Elsewhere())  # type: ignore[arg-type]
