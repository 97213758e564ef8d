"""Prefixes that running sequences are computing, so that no other sequence computes the same pages again."""

from __future__ import annotations

from rekindle._src.scheduling.sequence import Sequence

_WORTH_WAITING = 256  # tokens; saving that many is worth a wait even if more has to be computed afterwards


class PrefixClaims:
    """A running sequence claims the full pages it will compute; a waiting one is parked on the last one it would share.

    A claim ends when its page is published or its owner is preempted; sequences parked on it are tried again then.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._owners: dict[int, Sequence] = {}
        self._parked: dict[int, list[Sequence]] = {}
        self.parked = 0  # sequences that wait, aborted ones excluded

    def claim(self, sequence: Sequence, start: int) -> None:
        """Claim the full pages that the sequence computes, from page `start` on."""
        count = sequence.target // self._page_size
        for key in sequence.keys(count)[start:]:
            self._owners.setdefault(key, sequence)
        sequence.claimed = max(start, count)

    def resolve(self, sequence: Sequence, first: int, last: int) -> list[Sequence]:
        """End the claims on pages [first, last), published or abandoned. Return the sequences parked on them."""
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

    def worth_waiting(self, keys: list[int], cached: int, length: int, *, there: int | None = None) -> int:
        """Return the leading pages that are cached or that others compute, if waiting for these pays; else 0.

        `cached` pages can be used now, and `there` are on the device, if that is more.

        Sharing a page or two of a long prompt does not pay: the wait costs the latency of steps, so it has to save at
        least half of what is left to compute, or 256 tokens.
        """
        shared = self.reach(keys, cached if there is None else there)
        saved = (shared - cached) * self._page_size
        left = length - cached * self._page_size
        return shared if saved and (saved >= _WORTH_WAITING or 2 * saved >= left) else 0

    def reach(self, keys: list[int], cached: int) -> int:
        """Return how many leading pages are cached (`cached` of them) or computed by others right behind these."""
        shared, owners = cached, self._owners
        while shared < len(keys) and keys[shared] in owners:
            shared += 1
        return shared

    def owner(self, key: int) -> Sequence | None:
        """Return the sequence that computes the page with this key, if one does."""
        return self._owners.get(key)

    def park(self, sequence: Sequence, key: int) -> Sequence:
        """Park the sequence until the page with this key is published. Return the sequence that computes it."""
        owner = sequence.waits_for = self._owners[key]
        self._parked.setdefault(key, []).append(sequence)
        self.parked += 1
        return owner

    def unpark(self, sequence: Sequence) -> None:
        """Take out a parked sequence that was aborted; its entry is skipped later."""
        sequence.waits_for = None
        self.parked -= 1

    def check_integrity(self, running: list[Sequence]) -> None:
        assert all(owner in running for owner in self._owners.values()), "a claim outlived its owner"
        assert set(self._parked) <= set(self._owners), "a sequence waits for a page that no sequence computes"
        waiting = sum(waiter.waits_for is not None for group in self._parked.values() for waiter in group)
        assert waiting == self.parked, f"{waiting} sequences are parked, {self.parked} are counted"
