"""The seam of drafters: what one has to say and do, whatever its tokens come from.

A drafter belongs to a session. Of each request that it drafts for, it keeps a `RequestDrafts`. Drafters are chained:
the first one with a proposal for a row has that row. What they propose is never part of a text by itself: a draft is
accepted if the model, with the request's own seed, chooses that very token. So a drafter needs no proof, only a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from rekindle._src.core.drawable import html_of
from rekindle._src.core.records import DraftTask, EntryLag, IntArray, Row
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Sequence


class DraftCounts(NamedTuple):
    """The numbers of tokens that a drafter proposed and steps computed, and that the model chose as well."""

    drafted: int
    accepted: int

    def __str__(self) -> str:
        return f"{self.accepted:,} of {self.drafted:,} accepted"

    def _repr_html_(self) -> str:
        return html_of(self)


def summed_counts(parts: Iterable[Mapping[str, DraftCounts]]) -> dict[str, DraftCounts]:
    """Return the sums by drafter."""
    sums: dict[str, DraftCounts] = {}
    for part in parts:
        for name, counts in part.items():
            before = sums.get(name, DraftCounts(0, 0))
            sums[name] = DraftCounts(before.drafted + counts.drafted, before.accepted + counts.accepted)
    return sums


class DraftableRow(NamedTuple):
    """A row that may have drafts."""

    sequence: Sequence
    skip: int  # tokens between the known ones and the first draft: those that steps in flight will bring
    most: int  # drafts that it may have


class Drafter:
    """Proposes tokens for rows. The base of all drafters; each has a `name` in statistics."""

    name = ""
    crowded = False  # the step being planned has no room for drafts, so that none are to be waited for
    reach = 0  # positions after a request's known tokens that have to have pages while it drafts, however few
    most = 0  # drafts of a request in a step, where an option says how many; 0: none does
    bound = 1 << 30  # drafts of a request in a step that it can take at most

    @property
    def awake(self) -> bool:
        """True while it proposes anything, and has tasks."""
        return True

    def begin(self, sequence: Sequence) -> RequestDrafts | None:
        """Begin with a request before its first decode row is planned. Return its record; None if it drafts none."""
        raise NotImplementedError

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        """Return a proposal for each row, the tokens after `skip` others; None where it has none."""
        raise NotImplementedError

    def tasks(self, sequences: Items[Sequence], rows: Items[Row]) -> tuple[DraftTask, ...]:
        """Return its tasks on the device before a step with decode `rows` of `sequences`."""
        return ()

    def entries(self, sequences: Items[Sequence], rows: Items[Row], *, enters: bool) -> Mapping[int, EntryLag] | None:
        """Return for each row, by its slot, which entries a step computes for it; None if the step computes none. It
        `enters` for another reason, if it does."""
        return None

    def checked(self, sequence: Sequence) -> None:
        """Note that a request continues after the last accepted draft."""

    def lost(self) -> None:
        """Note that its state on the device was lost. Called in the device thread."""

    def planned(self, step: int) -> None:
        """Note that a step is planned."""

    def end(self, sequence: Sequence) -> None:
        """Note that a request has ended."""

    @property
    def most_tokens(self) -> int:
        """How many tokens of earlier texts it keeps."""
        return 0

    def remember(self, texts: Iterable[IntArray]) -> None:
        """Take texts without a salt that the session's cache was restored with, the latest one last."""

    def forget(self) -> None:
        """Forget all texts: the session's cache was cleared."""
