"""A follower's parts of pages, without JAX: on their way from the devices, in host memory, and on its own disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rekindle._src.channels.channel import MessageKind
from rekindle._src.kvcache.digest import page_digest
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import LeafSpec, Page
from rekindle._src.kvcache.tiers.disk import DiskTier, part_identity
from rekindle._src.processes.replay import KeptPages
from rekindle.errors import ProcessLost

IDENTITY = part_identity(
    Identity("weights", "float32", 4, "layout", vocab_size=99), [[1]], [LeafSpec((1, 2, 1, 4), "float32")]
)
A, B = b"a" * 16, b"b" * 16


def part(value: float, pages: int = 1) -> tuple[np.ndarray, ...]:
    return (
        np.full((pages, 1, 2, 1, 4), value, np.float32) + np.arange(pages, dtype=np.float32).reshape(-1, 1, 1, 1, 1),
    )


class Device:
    """A gather whose pages come when they are let go."""

    def __init__(self, value: float, pages: int = 1) -> None:
        self.arrays, self.there = part(value, pages), threading.Event()


class Codec:
    """Messages are what they say; parts are as they come."""

    parts: Any

    def __init__(self) -> None:
        self.parts = self

    def to_host(self, device: Device) -> list[np.ndarray]:
        assert device.there.wait(60)
        return list(device.arrays)

    collect = to_host

    def part(self, digest: bytes, found: Any) -> tuple[bytes, Any]:
        return digest, found

    def encode_digests(self, digests: Sequence[bytes]) -> list[bytes]:
        return list(digests)


class Kept:
    """The pages, and what was said to the leader."""

    def __init__(self, disk: DiskTier | None = None) -> None:
        self.told: queue.SimpleQueue[tuple[MessageKind, Any]] = queue.SimpleQueue()
        self.pages = KeptPages(cast(Any, Codec()), lambda kind, content: self.told.put((kind, content)), disk)

    def fetched(self, digest: bytes) -> Any:
        self.pages.fetch(digest)
        kind, (name, found) = self.told.get(timeout=60)
        assert kind is MessageKind.PART and name == digest
        return found

    def read(self, *digests: bytes) -> list[bytes]:
        self.pages.read(digests)
        kind, found = self.told.get(timeout=60)
        assert kind is MessageKind.HAVE
        return list(found)


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.pages.close()


def page(first: int) -> Page:
    tokens = np.arange(first, first + 4, dtype=np.int32)
    return Page(page_digest(IDENTITY.root, tokens), IDENTITY.root, tokens, 1, 1.0)


def test_a_part_that_is_on_its_way_is_waited_for(kept: Kept) -> None:
    device = Device(3.0, pages=2)
    kept.pages.expect([A, B], cast(Any, device))
    threading.Timer(0.1, device.there.set).start()
    np.testing.assert_array_equal(kept.pages.get(B)[0], part(4.0)[0])
    np.testing.assert_array_equal(kept.fetched(A)[0], part(3.0)[0])
    assert len(kept.pages) == 2 and kept.pages.nbytes == 2 * 32


def test_a_page_dropped_on_its_way_is_not_kept_and_may_come_again(kept: Kept) -> None:
    first, second = Device(1.0), Device(1.0)
    kept.pages.expect([A], cast(Any, first))
    kept.pages.drop([A])
    kept.pages.expect([A], cast(Any, second))
    first.there.set()
    second.there.set()
    np.testing.assert_array_equal(kept.pages.get(A)[0], part(1.0)[0])
    kept.pages.drop([A])
    assert kept.fetched(A) is None and not len(kept.pages)


def test_a_part_that_is_not_kept_can_not_be_restored(kept: Kept) -> None:
    with pytest.raises(ProcessLost, match="is to be restored, which is not kept here"):
        kept.pages.get(A)
    with pytest.raises(ProcessLost, match="is to be kept, which was not read here"):
        kept.pages.keep(A, None)


def test_parts_are_written_from_either_place_and_read_by_the_next_session(tmp_path: Path) -> None:
    pages = [page(at) for at in (5, 20, 40)]
    first, second, third = (one.digest for one in pages)
    writing = Kept(DiskTier(tmp_path, 1 << 20, IDENTITY))
    writing.pages.keep(first, part(1.0))  # in host memory
    device = Device(2.0)
    device.there.set()
    writing.pages.collected([second], cast(Any, device))  # still on the devices; read to be saved
    writing.pages.store(pages)  # the leader saves all three
    assert set(writing.read(first, second, third)) == {first, second}
    writing.pages.close()
    disk = DiskTier(tmp_path, 1 << 20, IDENTITY)
    disk.scan()
    reading = Kept(disk)
    assert set(reading.read(first, second, third)) == {first, second}
    reading.pages.keep(second, None)
    reading.pages.keep(third, part(3.0))  # from the leader
    np.testing.assert_array_equal(reading.pages.get(second)[0], part(2.0)[0])
    np.testing.assert_array_equal(reading.pages.get(third)[0], part(3.0)[0])
    reading.pages.forget()
    assert reading.read(first) == []
    reading.pages.close()


def test_parts_of_other_heads_and_whole_pages_are_not_taken_for_these(tmp_path: Path) -> None:
    one = page(5)
    disk = DiskTier(tmp_path, 1 << 20, IDENTITY)
    disk.write([(one, part(1.0))])
    for other in (part_identity(IDENTITY, [[0]], IDENTITY.leaves), Identity("weights", "float32", 4, "layout")):
        elsewhere = DiskTier(tmp_path, 1 << 20, other)
        assert elsewhere.scan() == 0 and elsewhere.other_models()


def test_a_disk_that_is_full_loses_nothing(tmp_path: Path) -> None:
    kept = Kept(DiskTier(tmp_path, 8, IDENTITY))
    one = page(5)
    kept.pages.keep(one.digest, part(1.0))
    kept.pages.store([one])
    assert kept.read(one.digest) == [] and kept.pages.problem is None
    assert kept.fetched(one.digest) is not None
    kept.pages.close()
