"""Drafts of an assistant, which attends to the model's own pages and reads its hidden state before the latest token.

Both exist once the token does: for prompts, for cached pages and after a preemption. So an assistant misses nothing
of a text, keeps nothing of it, and can draft after each token whose step's result is known.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.core.records import DraftTask, Row
from rekindle._src.programs.draft_model import DRAFTS
from rekindle._src.scheduling.drafting.drafter import DraftableRow, TargetReads
from rekindle._src.scheduling.drafting.models import WeightsDrafter, WeightsDrafts
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Sequence


class AssistantDrafts(WeightsDrafts):
    """How the drafts of an assistant for one request fared."""

    __slots__ = ()
    words = "drafts of the assistant"


class AssistantDrafter(WeightsDrafter):
    """Plans the work of an assistant."""

    name = "assistant"
    reads = TargetReads(hidden=True)

    def begin(self, sequence: Sequence) -> RequestDrafts:
        return AssistantDrafts(self)

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        if not self.awake:
            return [None] * len(rows)
        proposals: list[Proposal | None] = []
        for sequence, skip, most in rows:
            drafts = sequence.drafting[self.name]
            count = min(most, DRAFTS, self._positions - sequence.known)
            if skip or count <= 0 or not isinstance(drafts, AssistantDrafts):
                proposals.append(None)
            else:
                proposals.append(Proposal([0] * count, drafts.chances(count)))  # the assistant writes the tokens
        return proposals

    def tasks(self, sequences: Items[Sequence], rows: Items[Row]) -> tuple[DraftTask, ...]:
        tasks = list[DraftTask]()
        for sequence, (row, chain) in self._chains(sequences, rows).items():
            drafts = sequence.drafting.get(self.name)
            if not isinstance(drafts, AssistantDrafts):
                continue
            self._note_request(drafts, has_drafts=bool(chain))
            drafts.near = self.awake and sequence.known < self._positions
            if chain:
                last = sequence.known - 1
                tasks.append(DraftTask(row, last, sequence.tokens(last, last + 1), tuple(chain)))
        return tuple(tasks)
