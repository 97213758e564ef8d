"""Drafts of the tokens that a grammar forces: a fifth of a text in JSON.

A grammar forces text, which the model may spell with other tokens than those proposed; then its own spelling counts, as
with any draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.drafts.kind import DraftKind
from rekindle._src.scheduling.drafting.drafter import DraftableRow, Drafter
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Limits, Sequence


class ForcedDrafter(Drafter):
    """Proposes the tokens that grammars of guided requests force; see `followers.ForcedTokens`."""

    name = "forced"

    def begin(self, sequence: Sequence) -> RequestDrafts | None:
        return sequence.forced

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        return [row.sequence.forced.propose(row.skip, row.most) if row.sequence.forced else None for row in rows]


class ForcedKind(DraftKind):
    """The drafter of any session with drafts."""

    def drafter(self, limits: Limits) -> Drafter:
        return ForcedDrafter()
