"""Drafts that continue the model's hidden state before the latest token: the rule of heads and of assistants.

That state exists once the token does, in a request that was computed since its admission.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.core.records import DraftTask, Row
from rekindle._src.drafts.calls import DRAFTS
from rekindle._src.drafts.resting import FAR, WeightsDrafter, WeightsDrafts
from rekindle._src.scheduling.drafting.drafter import DraftableRow
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Sequence


class HiddenDrafts(WeightsDrafts):
    """How the drafts for one request fared."""

    __slots__ = ("words",)

    def __init__(self, drafter: HiddenDrafter) -> None:
        super().__init__(drafter)
        self.words = drafter.words


class HiddenDrafter(WeightsDrafter):
    """Plans the work of a drafter that reads what the model computed before a request's latest token."""

    def __init__(self, name: str, words: str, positions: int) -> None:
        """`words` name its drafts in explanations; `positions` is the longest text that it drafts for."""
        super().__init__(positions)
        self.name, self.words = name, f"drafts of {words}"

    def begin(self, sequence: Sequence) -> RequestDrafts:
        return HiddenDrafts(self)

    def can_draft(self, sequence: Sequence) -> bool:
        """True if all that a draft after a request's latest token reads is on the device."""
        return sequence.has_hidden

    def room(self, sequence: Sequence) -> int:
        """Return how many tokens it can draft after a request's known ones."""
        return self.positions - sequence.tokens.known

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        proposals: list[Proposal | None] = []
        for sequence, skip, most in rows:
            drafts = sequence.drafting.by_name[self.name]
            assert isinstance(drafts, HiddenDrafts), f"{sequence.id} has drafts of another kind"
            count = 0 if skip or not drafts.awake else min(most, DRAFTS, self.room(sequence))
            if count > 0 and self.can_draft(sequence):
                proposals.append(Proposal([0] * count, drafts.chances(count)))  # the call writes the tokens
            else:
                proposals.append(None)
        return proposals

    def tasks(self, sequences: Items[Sequence], rows: Items[Row]) -> tuple[DraftTask, ...]:
        tasks = list[DraftTask]()
        for sequence, (row, chain) in self.chains(sequences, rows).items():
            drafts = sequence.drafting.by_name.get(self.name)
            if not isinstance(drafts, HiddenDrafts):
                continue
            self.note_request(drafts, has_drafts=bool(chain))
            drafts.near = self.wakes if self.room(sequence) > 0 else FAR
            if chain:
                last = sequence.tokens.known - 1
                tasks.append(DraftTask(row, last, sequence.tokens.values(last, last + 1), tuple(chain)))
        return tuple(tasks)
