"""Host memory of parts: the other processes keep and drop what this one does, in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle._src.kvcache import CostModel, Tiers
from rekindle._src.kvcache.tiers.host import DividedHostTier, Payload

A, B = b"a" * 16, b"b" * 16


def page(value: int) -> Payload:
    """A whole page with two heads."""
    return (np.full((1, 1, 2, 2, 4), value, np.float32) + np.arange(2, dtype=np.float32)[:, None],)


class Other:
    """One process, with the second head; this one has the first."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Payload] = {}
        self.expected: set[bytes] = set()

    def gathered(self, digest: bytes, whole: Payload) -> Payload:
        """A page leaves the devices; returns this process's part."""
        self.expected.add(digest)
        self.kept[digest] = tuple(leaf[:, :, :, 1:] for leaf in whole)
        return self.own_part(whole)

    def note_arrival(self, digest: bytes) -> bool:
        found = digest in self.expected
        self.expected.discard(digest)
        return found

    def own_part(self, whole: Payload) -> Payload:
        return tuple(leaf[:, :, :, :1] for leaf in whole)

    def keep(self, digest: bytes, whole: Payload) -> None:
        self.kept[digest] = tuple(leaf[:, :, :, 1:] for leaf in whole)

    def drop(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.expected.discard(digest)
            self.kept.pop(digest, None)

    def forget_read(self) -> None: ...
    def read(self, digests: Sequence[bytes]) -> None: ...

    def whole(self, digest: bytes, own_part: Payload) -> Payload | None:
        part = self.kept.get(digest)
        if part is None:
            return None
        return tuple(np.concatenate(pair, axis=3) for pair in zip(own_part, part, strict=True))


def test_a_part_from_the_devices_and_a_whole_page_are_kept_alike() -> None:
    other = Other()
    tier = DividedHostTier(1 << 20, other)
    Tiers(tier, CostModel(8)).put(A, other.gathered(A, page(3)))
    tier.put(B, page(5))
    for digest, value in ((A, 3), (B, 5)):
        (part,), whole = tier.get(digest), tier.peek(digest)
        assert whole is not None
        np.testing.assert_array_equal(part, page(value)[0][:, :, :, :1])
        np.testing.assert_array_equal(whole[0], page(value)[0])
    assert tier.statistics().bytes == 2 * 32, "the budget is that of one process"
    assert tier.peek(b"nothing") is None


def test_what_is_dropped_here_is_dropped_there() -> None:
    for drop in (lambda tier: tier.discard(A), lambda tier: tier.trim(0), lambda tier: tier.clear()):
        other = Other()
        tier = DividedHostTier(1 << 20, other)
        tier.put(A, page(1))
        assert A in other.kept
        drop(tier)
        assert A not in tier and not other.kept


def test_a_budget_drops_the_least_recently_used_in_both() -> None:
    other = Other()
    tier = DividedHostTier(80, other)
    for digest in (A, B, b"c" * 16):
        tier.put(digest, page(1))
    tier.touch(A)
    assert tier.trim() == 1
    assert set(other.kept) == {A, b"c" * 16}


def test_a_page_that_is_dropped_on_its_way_is_kept_by_none() -> None:
    other = Other()
    tier = DividedHostTier(1 << 20, other)
    part = other.gathered(A, page(1))
    tier.put(A, page(1))  # read ahead from disk meanwhile
    tier.discard(A)
    tier.put_part(A, part)
    assert A not in tier and A not in other.kept
    tier.put_part(A, other.gathered(A, page(1)))  # it leaves the devices again
    assert A in tier and A in other.kept


def test_a_page_that_another_process_lacks_can_not_be_read_whole() -> None:
    other = Other()
    tier = DividedHostTier(1 << 20, other)
    tier.put(A, page(1))
    del other.kept[A]
    assert tier.peek(A) is None
