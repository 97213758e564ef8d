"""Prefixes that running sequences are computing, so that no other sequence computes the same pages again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rekindle._src.kvcache.beginnings import common
from rekindle._src.kvcache.digest import salt_key
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.scheduling.sequence import Sequence

_WORTH_WAITING = 256  # tokens; saving that many is worth a wait even if more has to be computed afterwards

Place = tuple[int, bytes]  # the key of the page before, and the first tokens of a page


class Beginning(NamedTuple):
    """The beginning that a waiting sequence shares with a running one, `owner`, which computes the last of it."""

    owner: Sequence
    pages: int  # full ones, cached or being computed
    tokens: int = 0  # at the beginning of the next page


class PrefixClaims:
    """A running sequence claims the pages it will compute; a waiting one is parked on the last one it would share.

    Full pages are shared by their keys. Of the page behind them, which is copied then, `least` tokens or more may be
    shared; none if it is 0.

    A claim ends when its page is published, its prompt is computed or its owner is preempted; sequences parked on it
    are tried again then.
    """

    def __init__(self, page_size: int, least: int = 0) -> None:
        self._page_size, self._least = page_size, least
        self._owners: dict[int, Sequence] = {}
        self._beginnings: dict[Place, list[Sequence]] = {}
        # By a page's key, or by its owner and its index if its beginning is shared; with the number of those tokens.
        self._parked: dict[int | tuple[Sequence, int], list[tuple[Sequence, int]]] = {}
        self.parked = 0  # sequences that wait, aborted ones excluded

    def claim(self, sequence: Sequence, start: int) -> None:
        """Claim the pages that the sequence computes, from page `start` on."""
        count = pages_for(sequence.target, self._page_size)
        for key in sequence.keys(sequence.target // self._page_size)[start:]:
            self._owners.setdefault(key, sequence)
        for place in self._places(sequence, start, count):
            self._beginnings.setdefault(place, []).append(sequence)
        sequence.claimed = max(start, count)

    def resolve(self, sequence: Sequence, first: int, last: int) -> list[tuple[Sequence, int, int]]:
        """End the claims on pages [first, last), published or abandoned.

        Return the sequences parked on them, each with the page's index and how many tokens at its beginning it shares;
        0 if it shares the whole page.
        """
        woken: list[tuple[Sequence, int, int]] = []
        last = min(last, sequence.claimed)
        if first >= last:
            return woken
        for place in self._places(sequence, first, last):
            self._beginnings[place].remove(sequence)
            if not self._beginnings[place]:
                del self._beginnings[place]
        full = min(last, sequence.target // self._page_size)
        for index, key in enumerate(sequence.keys(full)[first:], first):
            if self._owners.get(key) is sequence:
                del self._owners[key]
                woken += self._woken(key, index)
        if self._parked:
            for index in range(first, last):
                woken += self._woken((sequence, index), index)
        for waiter, _, _ in woken:
            waiter.waits_for = None
        self.parked -= len(woken)
        return woken

    def worth_waiting(
        self, sequence: Sequence, keys: list[int], cached: int, *, there: int | None = None, copied: int = 0
    ) -> Beginning | None:
        """Return the longest beginning that is cached or that others compute, if waiting for these pays; else None.

        `cached` pages can be used now, and `there` are on the device, if that is more. Behind the cached ones, `copied`
        tokens can be copied now.

        Sharing a page or two of a long prompt does not pay: the wait costs the latency of steps, so it has to save at
        least half of what is left to compute, or 256 tokens.
        """
        shared, size = self.reach(keys, cached if there is None else there), self._page_size
        behind, tokens = self._behind(sequence, keys, shared)
        if tokens < self._least + (copied if shared == cached else 0):
            behind, tokens = None, 0
        saved = (shared - cached) * size + tokens - copied
        left = sequence.known - cached * size - copied
        if saved <= 0 or (saved < _WORTH_WAITING and 2 * saved < left):
            return None
        owner = self.owner(keys[shared - 1]) if behind is None else behind
        return None if owner is None else Beginning(owner, shared, tokens)

    def reach(self, keys: list[int], cached: int) -> int:
        """Return how many leading pages are cached (`cached` of them) or computed by others right behind these."""
        shared, owners = cached, self._owners
        while shared < len(keys) and keys[shared] in owners:
            shared += 1
        return shared

    def owner(self, key: int) -> Sequence | None:
        """Return the sequence that computes the page with this key, if one does."""
        return self._owners.get(key)

    def park(self, sequence: Sequence, keys: list[int], beginning: Beginning) -> None:
        """Park a sequence, whose pages have `keys`, until the last page of the beginning is published or computed."""
        owner, pages, tokens = beginning
        sequence.waits_for = owner
        self._parked.setdefault((owner, pages) if tokens else keys[pages - 1], []).append((sequence, tokens))
        self.parked += 1

    def unpark(self, sequence: Sequence) -> None:
        """Take out a parked sequence that was aborted; its entry is skipped later."""
        sequence.waits_for = None
        self.parked -= 1

    def check_integrity(self, running: list[Sequence]) -> None:
        beginning = [owner for owners in self._beginnings.values() for owner in owners]
        assert all(owner in running for owner in (*self._owners.values(), *beginning)), "a claim outlived its owner"
        for page in self._parked:
            claimed = page in self._owners if isinstance(page, int) else page[1] < page[0].claimed
            assert claimed, "a sequence waits for a page that no sequence computes"
        waiting = sum(waiter.waits_for is not None for group in self._parked.values() for waiter, _ in group)
        assert waiting == self.parked, f"{waiting} sequences are parked, {self.parked} are counted"

    def _woken(self, page: int | tuple[Sequence, int], index: int) -> list[tuple[Sequence, int, int]]:
        parked = self._parked.pop(page, ())
        return [(waiter, index, tokens) for waiter, tokens in parked if waiter.waits_for is not None]

    def _places(self, sequence: Sequence, first: int, last: int) -> Iterator[Place]:
        """Yield the places of the pages [first, last) of which the sequence computes enough for a copy."""
        size, least = self._page_size, self._least
        if not least:
            return
        keys = sequence.keys(sequence.target // size)
        for index in range(first, last):
            start = index * size
            if start + least <= sequence.target:
                before = keys[index - 1] if index else salt_key(sequence.root)
                yield before, sequence.tokens(start, start + least).tobytes()

    def _behind(self, sequence: Sequence, keys: list[int], pages: int) -> tuple[Sequence | None, int]:
        """Return which running sequence computes most of the tokens behind the first `pages`, and how many."""
        start = pages * self._page_size
        stop = min(start + self._page_size, sequence.reusable, sequence.known - 1)
        best: tuple[Sequence | None, int] = None, 0
        least = self._least
        if not 0 < least <= stop - start:
            return best
        tokens = sequence.tokens(start, stop)
        before = keys[pages - 1] if pages else salt_key(sequence.root)
        for owner in self._beginnings.get((before, tokens[:least].tobytes()), ()):
            count = common(owner.tokens(start, min(stop, owner.target)), tokens)
            if count > best[1]:
                best = owner, count
        return best
