"""Which pages are being computed right now and by whom, so that nobody computes the same prefix a second time."""

from __future__ import annotations

from rekindle._src.scheduling.sequence import Sequence

_ENOUGH = 256  # tokens worth a wait even if more has to be computed afterwards


class PrefixClaims:
    """A running sequence claims the full pages it is going to compute; a waiting one parks on the last it would share.

    A claim ends when its page is published, or when its owner lost its pages; whoever parked on it is tried again then.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._owners: dict[int, Sequence] = {}
        self._parked: dict[int, list[Sequence]] = {}
        self.parked = 0  # sequences that wait, aborted ones excluded

    def claim(self, sequence: Sequence, start: int) -> None:
        """It computes its full pages from page `start` on."""
        count = sequence.target // self._page_size
        for key in sequence.keys(count)[start:]:
            self._owners.setdefault(key, sequence)
        sequence.claimed = max(start, count)

    def resolve(self, sequence: Sequence, first: int, last: int) -> list[Sequence]:
        """Its pages [first, last) are published or abandoned; returns who waited for them."""
        woken: list[Sequence] = []
        last = min(last, sequence.claimed)
        if first >= last:
            return woken
        for key in sequence.keys(last)[first:last]:
            if self._owners.get(key) is sequence:
                del self._owners[key]
                if key in self._parked:
                    woken += (waiter for waiter in self._parked.pop(key) if waiter.waits_for is not None)
        for waiter in woken:
            waiter.waits_for = None
        self.parked -= len(woken)
        return woken

    def worth_waiting(self, keys: list[int], cached: int, length: int) -> int:
        """How many pages after the `cached` ones are being computed, if waiting for them is worth it; else 0.

        Sharing a page or two of a long prompt is not: the wait costs the latency of steps, so it has to save at least
        half of what is left to compute, or a sizeable piece.
        """
        shared = cached
        owners = self._owners
        while shared < len(keys) and keys[shared] in owners:
            shared += 1
        saved = (shared - cached) * self._page_size
        left = length - cached * self._page_size
        return shared if saved and (saved >= _ENOUGH or 2 * saved >= left) else 0

    def park(self, sequence: Sequence, key: int) -> Sequence:
        """It waits for the page with this key; returns who computes it."""
        owner = sequence.waits_for = self._owners[key]
        self._parked.setdefault(key, []).append(sequence)
        self.parked += 1
        return owner

    def unpark(self, sequence: Sequence) -> None:
        """It was aborted; its entry is skipped when its turn comes."""
        sequence.waits_for = None
        self.parked -= 1

    def check_integrity(self, running: list[Sequence]) -> None:
        assert all(owner in running for owner in self._owners.values()), "a claim outlived its owner"
        assert set(self._parked) <= set(self._owners), "somebody waits for a page that nobody computes"
        waiting = sum(waiter.waits_for is not None for group in self._parked.values() for waiter in group)
        assert waiting == self.parked, f"{waiting} sequences are parked, {self.parked} are counted"
