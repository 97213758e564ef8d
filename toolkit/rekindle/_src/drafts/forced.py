"""Drafts of the tokens that a grammar forces: a fifth of a text in JSON.

A grammar forces text, which the model may spell with other tokens than those proposed; then its own spelling counts, as
with any draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.drafts.kind import DraftKind
from rekindle._src.scheduling.drafting.drafter import DraftableRow, Drafter
from rekindle._src.scheduling.drafting.proposal import OwnDrafts, Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Limits, Sequence


class ForcedDrafter(Drafter):
    """Proposes the tokens that grammars force; a follower of the request knows them."""

    name = "forced"

    def begin(self, sequence: Sequence) -> RequestDrafts | None:
        return _own(sequence)

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        each = [(row, _own(row.sequence)) for row in rows]
        return [None if drafts is None else drafts.propose(row.skip, row.most) for row, drafts in each]


def _own(sequence: Sequence) -> OwnDrafts | None:
    return next((one for one in sequence.extensions.followers if isinstance(one, OwnDrafts)), None)


class ForcedKind(DraftKind):
    """The drafter of any session with drafts."""

    def drafter(self, limits: Limits) -> Drafter:
        return ForcedDrafter()
