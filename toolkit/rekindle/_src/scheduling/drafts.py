"""Drafts: rows of a step that compute a request's guessed tokens beside its next one.

A draft is a decode row like any other, one position further on, with the guess as its token. All rows write their keys
and values before attention reads, and a draw depends on seed and position alone, so that a draft row samples what the
request would have sampled there if its guesses are right. The first wrong one ends the chain; what rows behind it wrote
lies past the request's length, where the next step writes over it.

Nobody knows how far a request is until such a step is committed, so no step is planned before: the device waits for the
host once, which has to be worth it to everybody in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from rekindle._src.core.records import Row
from rekindle._src.programs.buckets import padded_rows
from rekindle._src.scheduling.limits import Limits
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.prompt_lookup import PromptLookup
from rekindle._src.scheduling.sequence import Sequence

# Up to here a row costs little. Beyond, drafts only fill up what would be padding: free but for native products, which
# skip it, so that guesses have to be good.
FEW_ROWS = 8
# What the wait costs, as a share of a step: 0.14 with 135M parameters on two cores, all of it with 4M. Guesses have to
# bring that much for each row of the step. With 4M, four at once still end a tenth later: the last is never guessed.
WAIT = 1.0


class Drafts:
    """Adds draft rows to a step that is otherwise planned."""

    def __init__(self, limits: Limits, ledger: PageLedger) -> None:
        self._limits, self._ledger = limits, ledger
        self.drafted = 0  # rows whose steps were committed

    def extend(self, sequences: list[Sequence], rows: list[Row], budget: int, *, mixed: bool) -> None:
        """Put drafts behind some of a step's decode rows, within `budget` and pages that nobody needs."""
        guessing = [sequence for sequence in sequences if self._guesses(sequence)]
        counts = self._counts(guessing, len(rows), budget, mixed=mixed) if guessing else {}
        for sequence in guessing:
            if count := self._within_pages(sequence, counts.get(sequence, 0)):
                after = sequences.index(sequence) + 1
                skip = sequence.planned - sequence.known
                drafts = sequence.drafts(_lookup(sequence).guess(skip, count))
                rows[after:after] = drafts
                sequences[after:after] = [sequence] * len(drafts)

    def learn(self, sequences: Items[Sequence], rows: Items[Row], right: Items[bool]) -> None:
        """A step with drafts was committed."""
        drafted, accepted = Counter[Sequence](), Counter[Sequence]()
        for sequence, row, was_right in zip(sequences, rows, right, strict=True):
            if row.draft:
                drafted[sequence] += 1
                accepted[sequence] += was_right
        for sequence, count in drafted.items():
            _lookup(sequence).learn(count, accepted[sequence])
            sequence.drafts_checked()
            self.drafted += count

    def _guesses(self, sequence: Sequence) -> bool:
        if sequence.lookup is None:
            sampling = sequence.request.sampling
            if sampling.penalised or sampling.processors:
                return False  # reads which tokens were sampled before, and the device counts no guesses
            sequence.lookup = PromptLookup(sequence.tokens(0, sequence.known))
        return sequence.lookup.guesses and sequence.remaining > 0

    def _counts(self, guessing: list[Sequence], rows: int, budget: int, *, mixed: bool) -> dict[Sequence, int]:
        """How many drafts each gets: one more than may well be right, and what fills the program up."""
        most = self._limits.max_requests
        room = min(budget, max(padded_rows(rows, most, mixed=mixed), min(FEW_ROWS, most)) - rows)
        bounds = {s: min(self._limits.prompt_lookup, s.remaining) for s in guessing}
        hopes = {s: _lookup(s).hope for s in guessing}
        counts = _shared({s: min(bound, 1 + int(hopes[s])) for s, bound in bounds.items()}, room)
        if sum(min(count, hopes[s]) for s, count in counts.items()) < WAIT * rows:
            return {}
        wanted = sum(counts.values())
        return _shared(bounds, min(room, padded_rows(rows + wanted, most, mixed=mixed) - rows))

    def _within_pages(self, sequence: Sequence, count: int) -> int:
        """At most `count`, so that their pages are there; takes one only if everybody who runs could have one too."""
        size, everybody = self._limits.page_size, self._limits.max_requests
        while sequence.planned + count > sequence.num_pages * size:
            if self._ledger.available <= everybody or not self._ledger.grow(sequence):
                return sequence.num_pages * size - sequence.planned
        return count


def _lookup(sequence: Sequence) -> PromptLookup:
    assert sequence.lookup is not None, f"{sequence.id} guesses without a lookup"
    return sequence.lookup


def _shared(bounds: dict[Sequence, int], room: int) -> dict[Sequence, int]:
    """`room` dealt out one by one, at most its bound to each."""
    counts = dict.fromkeys(bounds, 0)
    while room > 0:
        hungry = [s for s, bound in bounds.items() if counts[s] < bound][:room]
        if not hungry:
            break
        for sequence in hungry:
            counts[sequence] += 1
        room -= len(hungry)
    return counts
