"""Memory that two processes share: bytes arrive through it as they were given, and no other memory is believed."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from typing import Any

import pytest

from rekindle._src.channels import bulk
from rekindle._src.channels.bulk import PART, PARTS, BulkChannel, ReceiveMemory, SendMemory
from rekindle._src.channels.channel import ChannelKeys, MessageKind
from rekindle.errors import ProcessLost

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files without a name")
KEYS = ChannelKeys(b"a" * 32, b"b" * 32)


def channels() -> tuple[BulkChannel, BulkChannel]:
    near, far = socket.socketpair()
    return BulkChannel(near, KEYS, silence=60), BulkChannel(far, ChannelKeys(KEYS.receiving, KEYS.sending), silence=60)


def joined() -> tuple[BulkChannel, BulkChannel]:
    """Two channels, of which the second reads the memory of the first."""
    one, two = channels()
    assert two.take_memory(one.offer_memory())
    one.pass_memory()
    return one, two


@pytest.mark.parametrize(
    "sizes",
    [[10], [PART], [PART + 1], [PART - 1, 2, PART * 3 + 7], [1000] * 3000, [PART * PARTS * 2 + 5], [0, 5, 0], []],
    ids=str,
)
def test_what_is_given_arrives_as_it_was(sizes: list[int]) -> None:
    one, two = joined()
    pieces = [os.urandom(size) for size in sizes]
    for _ in range(2):  # the parts are used again
        slots = [bytearray(size) for size in sizes]
        given = [memoryview(piece) for piece in pieces]
        sender = threading.Thread(target=one.send_followed, args=(MessageKind.PAGES, b"abcd", given))
        sender.start()
        assert two.receive() == (MessageKind.PAGES, b"abcd")
        two.receive_into([memoryview(slot) for slot in slots])
        sender.join(60)
        assert slots == pieces
        two.send(MessageKind.WANT, b"more")  # after the bytes that say what was copied
        assert one.receive() == (MessageKind.WANT, b"more")
    one.close(), two.close()


def test_the_side_that_gives_waits_for_room() -> None:
    one, two = joined()
    data = os.urandom(PART * (PARTS + 2))
    sender = threading.Thread(target=one.send_followed, args=(MessageKind.PAGES, b"", [memoryview(data)]))
    sender.start()
    sender.join(0.3)
    assert sender.is_alive(), "all parts are full"
    found = bytearray(len(data))
    two.receive()
    two.receive_into([memoryview(found)])
    sender.join(60)
    assert found == data
    one.close(), two.close()


def test_a_connection_that_ends_amid_it_is_lost_on_both_sides() -> None:
    one, two = joined()
    one.connection.sendall(b"\0")  # one part of three
    one.close()
    with pytest.raises(ProcessLost):
        two.receive_into([memoryview(bytearray(PART * 3))])
    two.close()
    one, two = joined()
    two.close()
    with pytest.raises(ProcessLost):
        one.send_followed(MessageKind.PAGES, b"", [memoryview(bytes(PART * (PARTS + 1)))])
    one.close()


def test_nothing_that_is_not_what_was_offered_is_read() -> None:
    given = SendMemory()
    offer = given.offer()
    other = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(other, bulk.SIZE)
    small = os.memfd_create("small")
    cases: list[tuple[Any, str]] = [
        ({**offer, "number": "00" * 32}, "another one"), ({**offer, "file": other}, "could shrink"),
        ({**offer, "file": small}, "another size"), ({**offer, "number": "x"}, "is invalid"),
        ({**offer, "process": "1/../2"}, "is invalid"), ({**offer, "file": True}, "is invalid"),
        ({**offer, "size": 1 << 40}, "is invalid"), ([], "is invalid"), ({**offer, "process": 1 << 40}, "No such"),
    ]  # fmt: skip
    for told, why in cases:
        with pytest.raises(OSError, match=why):
            ReceiveMemory(told)
    os.close(other), os.close(small)
    ReceiveMemory(offer)
    given.close()
    with pytest.raises(OSError):
        ReceiveMemory(offer)


def test_the_memory_can_not_shrink_or_be_written_by_the_other_side() -> None:
    given = SendMemory()
    with pytest.raises(OSError):
        os.ftruncate(given._file, 0)
    taken = ReceiveMemory(given.offer())
    assert not taken._memory.flags.writeable
    given.close()
    assert bulk.FIRST % mmap.PAGESIZE == 0


def test_sealed_channels_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = channels()
    offer = one.offer_memory()
    one.sealed = two.sealed = True
    assert not two.take_memory(offer)
    assert one.offer_memory() is None
    with pytest.raises(ProcessLost, match="not offered"):
        two.pass_memory()
    one.close(), two.close()


def test_without_files_without_a_name_the_socket_carries_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = channels()
    monkeypatch.delattr(os, "memfd_create")
    assert one.offer_memory() is None and not two.take_memory(None)
    one.send_followed(MessageKind.PAGES, b"", [memoryview(b"xyz")])
    two.receive()
    found = bytearray(3)
    two.receive_into([memoryview(found)])
    assert found == b"xyz"
    one.close(), two.close()
