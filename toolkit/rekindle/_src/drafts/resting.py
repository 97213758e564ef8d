"""Drafts that are computed on the device before a step, for all of its rows in one call: when they are worth it.

The step that checks drafts is planned before they are made: how many are worth it follows from how often those at each
place were right, and from what such steps took. They are made on the device before the rows run. While drafts don't pay
for a request, nothing is computed for it: it rests, and tries again after a pause that grows. When that happens to
several requests in a row, the drafter rests, and afterwards tries with one request alone.

It proposes for a row whose tokens are all known. So a request asks for the result of its step to be read before the
next one is planned, while drafts pay.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.core.records import Row
from rekindle._src.drafts.calls import DRAFTS
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.drafting.proposal import Acceptance, RequestDrafts
from rekindle._src.scheduling.sequence import Sequence

SHORTEST_PAUSE, _LONGEST, _LONGER = 32, 1024, 4  # steps of a pause, and by how much the next one is longer
PLAIN_STEPS, _PERIOD = 8, 1024  # in the first of so many steps nothing is drafted, so that plain steps are timed
_PATIENCE = 2  # steps in a row that wait for a request and have no drafts, after which the request rests
_REQUESTS = 3  # requests that rested in a row, after which the drafter rests
_PROVEN = 8  # steps in a row with drafts of a request, after which they are known to pay
FAR = -1  # the request can't draft in its next step
_EXPECTED = 0.6  # the chance of a draft before any was seen
_DOUBTED = 2.0  # observations that count after a pause


class WeightsDrafts(RequestDrafts):
    """How often the drafts for a request were right, and whether there are some for its next step."""

    __slots__ = ("acceptance", "declined_after", "drafter", "near", "pause", "rests_until", "row")

    def __init__(self, drafter: WeightsDrafter) -> None:
        super().__init__()
        self.drafter, self.acceptance = drafter, Acceptance()
        self.near = FAR  # the drafter's `wakes` if the request can draft in its next step
        self.rests_until, self.pause = 0, SHORTEST_PAUSE  # the step after which it may draft again, and steps of a rest
        self.row = 0  # steps in a row with drafts of this drafter, or, below 0, that waited for nothing
        self.declined_after = -1  # the step after which a step had no drafts for it, since they didn't pay

    @property
    def awake(self) -> bool:
        """True while it is drafted for."""
        drafter = self.drafter
        return drafter.awake and drafter.step >= self.rests_until and drafter.takes(self)

    @property
    def asks(self) -> bool:
        return self.near == self.drafter.wakes and self.awake and not self.drafter.crowded

    def declined(self) -> None:
        self.declined_after = self.drafter.step

    def learn(self, drafted: int, accepted: int) -> None:
        super().learn(drafted, accepted)
        for place in range(min(accepted + 1, drafted)):
            self.acceptance.add(place < accepted)
            self.drafter.places[place].add(place < accepted)

    def chances(self, count: int) -> list[float]:
        """Return how likely each of its next drafts is right if those before it are."""
        return [self.acceptance.chance(place.chance(_EXPECTED)) for place in self.drafter.places[:count]]


class WeightsDrafter(Drafter):
    """A drafter that computes tokens on the device before a step. It rests while its drafts don't pay."""

    def __init__(self, positions: int) -> None:
        """`positions` is the longest text that it drafts for."""
        self.positions = positions
        self.places = [Acceptance() for _ in range(DRAFTS)]  # of all requests
        self.step = 0  # the latest that was planned
        self.wakes = 0  # how often it began to draft
        self.pause, self._rest = SHORTEST_PAUSE, 0
        self._failed = 0  # requests that rested in a row
        self._trial: WeightsDrafts | None = None  # the request by which it is tried if drafts pay again
        # The requests that the step being planned waited for, and whether it has drafts.
        self._waited, self._drafts = list[WeightsDrafts](), False
        self._measures = True  # nothing is drafted, so that plain steps are timed

    @property
    def awake(self) -> bool:
        return not self._rest and not self._measures

    def takes(self, drafts: WeightsDrafts) -> bool:
        """True if it drafts for a request. After several failed, it tries again with the first one that asks."""
        if self._failed < _REQUESTS:
            return True
        if self._trial is None:
            self._trial = drafts
        return self._trial is drafts

    def end(self, sequence: Sequence) -> None:
        if sequence.drafting.by_name.get(self.name) is self._trial:
            self._trial = None

    def chains(self, sequences: Items[Sequence], rows: Items[Row]) -> dict[Sequence, tuple[Row, list[Row]]]:
        """Return the first row of each sequence, and its rows of drafts from this drafter."""
        chains: dict[Sequence, tuple[Row, list[Row]]] = {}
        for sequence, row in zip(sequences, rows, strict=True):
            _, chain = chains.setdefault(sequence, (row, []))
            if row.draft and sequence.drafting.proposer == self.name:
                chain.append(row)
        return chains

    def note_request(self, drafts: WeightsDrafts, *, has_drafts: bool) -> None:
        """Note whether the step waited for a request's token, and whether it drafts for it."""
        if has_drafts:
            self._drafts = True
            drafts.row = max(0, drafts.row) + 1
            if drafts.row == _PROVEN:
                self.pause, self._failed, drafts.pause = SHORTEST_PAUSE, 0, SHORTEST_PAUSE
        elif drafts.asks:
            self._waited.append(drafts)

    def planned(self, step: int) -> None:
        slept, before, self.step = not self.awake, self.step, step
        self._measures = step % _PERIOD < PLAIN_STEPS
        if self._rest:
            self._rest -= 1
            if not self._rest:
                for place in self.places:
                    place.doubt(_DOUBTED)
        elif self._waited and not self._drafts:
            self._missed(self._waited, before)
        self._waited, self._drafts = [], False
        self.wakes += slept and self.awake

    def _missed(self, requests: Items[WeightsDrafts], before: int) -> None:
        """Count a step that waited for requests and has no drafts. After `_PATIENCE` in a row a request rests."""
        known = self._failed
        for drafts in requests:
            drafts.row = min(0, drafts.row) - 1
            if drafts.row > -_PATIENCE:
                continue
            drafts.row, self._trial = 0, None
            if drafts.declined_after != before:  # their program is being made
                drafts.rests_until = self.step + SHORTEST_PAUSE
                continue
            drafts.rests_until = self.step + drafts.pause
            drafts.pause = min(_LONGER * drafts.pause, _LONGEST)
            drafts.acceptance.doubt(_DOUBTED)
            self._failed += 1
        if self._failed >= max(known + 1, _REQUESTS):
            self._rest = self.pause
            self.pause = min(_LONGER * self.pause, _LONGEST)
