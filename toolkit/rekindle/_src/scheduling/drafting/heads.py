"""Drafts that continue the model's hidden state before the latest token: of a head, and of an assistant.

That state exists once the token does, in a request that was computed since its admission. An assistant attends to the
model's own pages, so it misses nothing of a text and keeps nothing of it. A head has entries in the pages, which steps
make (`programs.draft_head`): it drafts where none is missing.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from rekindle._src.core.records import MOST_MISSING, DraftTask, EntryLag, Row
from rekindle._src.programs.draft_model import DRAFTS
from rekindle._src.scheduling.drafting.drafter import DraftableRow
from rekindle._src.scheduling.drafting.models import FAR, WeightsDrafter, WeightsDrafts
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Sequence

_OWNERS = {
    "mtp": "the model's own head",
    "eagle3": "the EAGLE-3 head",
    "dflash": "the DFlash head",
    "assistant": "the assistant",
}


class _Entered(NamedTuple):
    """The leading tokens of a request that a head has entries of, in an epoch of the request."""

    epoch: int
    tokens: int


class HeadDrafts(WeightsDrafts):
    """How the drafts of a head or an assistant for one request fared."""

    __slots__ = ()

    @property
    def words(self) -> str:  # type: ignore[override]
        return f"drafts of {_OWNERS[self.drafter.name]}"


class HeadDrafter(WeightsDrafter):
    """Plans the work of a head with entries in the model's pages."""

    def __init__(self, positions: int, name: str = "mtp", block: int = 0) -> None:
        """`block` is the number of tokens of a block, the last one of the text included; 0: it drafts no blocks."""
        super().__init__(positions)
        self.name, self.reach = name, max(0, block - 1)
        self._entered: dict[Sequence, _Entered] = {}

    def begin(self, sequence: Sequence) -> RequestDrafts:
        return HeadDrafts(self)

    def can_draft(self, sequence: Sequence) -> bool:
        """True if all that a draft after a request's latest token reads is on the device."""
        return sequence.has_hidden and self.entered(sequence) >= sequence.known - 1

    def entered(self, sequence: Sequence) -> int:
        """Return of how many leading tokens it has entries, or does without."""
        known = self._entered.get(sequence)
        return sequence.cached if known is None or known.epoch != sequence.epoch else known.tokens

    def entries(self, sequences: Items[Sequence], rows: Items[Row], *, enters: bool) -> dict[int, EntryLag] | None:
        """A step computes entries if it has prompts or drafts, or if a row lacks those of `MOST_MISSING` tokens."""
        lags = dict[int, EntryLag]()
        for sequence, row in zip(sequences, rows, strict=True):
            if row.draft:
                enters = True
                continue
            end, missing = row.start + row.length, row.start - self.entered(sequence)
            follows = end < sequence.known and not row.samples
            lags[row.slot] = EntryLag(missing, int(sequence.tokens(end, end + 1)[0]) if follows else -1)
            enters = enters or missing >= MOST_MISSING
        if not enters:
            return None
        for sequence, row in zip(sequences, rows, strict=True):
            self._entered[sequence] = _Entered(sequence.epoch, row.start + row.length)
        return lags

    def checked(self, sequence: Sequence) -> None:
        self._entered[sequence] = _Entered(sequence.epoch, min(self.entered(sequence), sequence.planned))

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._entered.pop(sequence, None)

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens it can draft after a request's known ones: a block is drafted whole or not at all."""
        room = self._positions - sequence.known
        return room if room >= self.reach else 0

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        proposals: list[Proposal | None] = []
        for sequence, skip, most in rows:
            drafts = sequence.drafting[self.name]
            assert isinstance(drafts, HeadDrafts), f"{sequence.id} has drafts of another kind"
            count = 0 if skip or not drafts.awake else min(most, DRAFTS, self._room(sequence))
            if count > 0 and self.can_draft(sequence):
                proposals.append(Proposal([0] * count, drafts.chances(count)))  # the head writes the tokens
            else:
                proposals.append(None)
        return proposals

    def tasks(self, sequences: Items[Sequence], rows: Items[Row]) -> tuple[DraftTask, ...]:
        tasks = list[DraftTask]()
        for sequence, (row, chain) in self._chains(sequences, rows).items():
            drafts = sequence.drafting.get(self.name)
            if not isinstance(drafts, HeadDrafts):
                continue
            self._note_request(drafts, has_drafts=bool(chain))
            drafts.near = self.wakes if self._room(sequence) > 0 else FAR
            if chain:
                last = sequence.known - 1
                tasks.append(DraftTask(row, last, sequence.tokens(last, last + 1), tuple(chain)))
        return tuple(tasks)


class AssistantDrafter(HeadDrafter):
    """Plans the work of an assistant."""

    def __init__(self, positions: int) -> None:
        super().__init__(positions, "assistant")

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence.has_hidden

    def entries(self, sequences: Items[Sequence], rows: Items[Row], *, enters: bool) -> None:
        return None  # it keeps none

    def checked(self, sequence: Sequence) -> None:
        pass
