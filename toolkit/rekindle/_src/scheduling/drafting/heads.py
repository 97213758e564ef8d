"""Drafts that continue the model's hidden state before the latest token: of a head, and of an assistant.

That state exists once the token does, in a request that was computed since its admission. An assistant attends to the
model's own pages, so it misses nothing of a text and keeps nothing of it. A head has entries in the pages, which steps
make (`programs.draft_head`): it drafts where none is missing.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.core.records import DraftTask, Row
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

    def begin(self, sequence: Sequence) -> RequestDrafts:
        return HeadDrafts(self)

    def can_draft(self, sequence: Sequence) -> bool:
        """True if all that a draft after a request's latest token reads is on the device."""
        return sequence.has_hidden and sequence.entered >= sequence.known - 1

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
