"""Drafts of the model's own head: one token after each row, computed in the step that chooses the token before it.

A request asks for drafts while they pay. A step that drafts costs the head, and the next one is planned only when its
result is known. So a request whose drafts are not taken, since they don't gain what that costs, rests: its steps don't
draft, and are planned ahead. It tries again after a pause, which doubles as long as that goes on, and halves with each
draft that was right. Pauses end at multiples of their length, counted in steps, so that requests try in the same step:
each such step costs all of its rows a wait.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.core.records import Row, RowResult
from rekindle._src.core.report_kinds import DRAFTED
from rekindle._src.scheduling.drafting.drafter import DraftableRow, Drafter, TargetReads
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Sequence

_SHORTEST, _LONGEST = 4, 256  # steps of a pause, powers of two
_PATIENCE = 4  # proposals that are not taken before pauses grow: what a step costs is not known at first
_PLAIN, _PERIOD = 8, 1024  # in the first of so many steps nothing is drafted, so that plain steps are timed
_EXPECTED, _PRIOR = 0.6, 4.0  # the chance of a draft before any was seen, and how many observations that counts for
_REMEMBERED = 64.0  # observations after which they count half


class Acceptance:
    """How often drafts are what the model says next, by those that were seen, whether they were computed or not."""

    __slots__ = ("_right", "_seen")

    def __init__(self) -> None:
        self._right = self._seen = 0.0

    def add(self, right: bool) -> None:
        """Add a draft."""
        self._right += right
        self._seen += 1.0
        if self._seen > _REMEMBERED:
            self._right, self._seen = 0.5 * self._right, 0.5 * self._seen

    def doubt(self, most: float) -> None:
        """Let what was seen count for `most` drafts: it may not hold any more."""
        if self._seen > most:
            self._right, self._seen = self._right * most / self._seen, most

    def chance(self, expected: float) -> float:
        """Return the chance of the next draft, which is taken to be `expected` before any was seen."""
        return (self._right + _PRIOR * expected) / (self._seen + _PRIOR)


class HeadDrafts(RequestDrafts):
    """The draft of a request, and whether its next step shall draft again."""

    __slots__ = ("_acceptance", "_declined", "_head", "_next", "_pause", "_resumes", "draft")
    words = "drafts of the model's own head"

    def __init__(self, head: HeadDrafter) -> None:
        super().__init__()
        self._head, self._acceptance = head, Acceptance()
        self.draft = self._next = -1  # of the token after the known ones, and of the one after that; -1: none
        self._pause = head.pause
        self._declined = 0 if head.pause == _SHORTEST else _PATIENCE
        self._resumes = head.end_of_pause(head.pause)  # the step in which it asks again
        self.ready = False

    @property
    def asks(self) -> bool:
        return self._head.step >= self._resumes and not self._head.measures

    @property
    def chance(self) -> float:
        """How likely its draft is right."""
        return self._acceptance.chance(self._head.acceptance.chance(_EXPECTED))

    def computed(self, draft: int) -> None:
        """Take the draft after the token that is pushed next."""
        self._next = draft

    def push(self, token: int) -> None:
        if self.draft >= 0:
            right = token == self.draft
            self._acceptance.add(right)
            self._head.acceptance.add(right)
            if right and self._declined > _PATIENCE:
                self._pause = max(_SHORTEST, self._pause // 4)  # it was doubled when the draft was declined
        self.draft, self._next = self._next, -1
        self.ready = self.draft >= 0

    def learn(self, drafted: int, accepted: int) -> None:
        super().learn(drafted, accepted)
        if accepted:
            self._pause = self._head.pause = _SHORTEST
            self._declined = 0

    def declined(self) -> None:
        self._resumes = self._head.end_of_pause(self._pause)
        self._declined += 1
        if self._declined > _PATIENCE:
            self._pause = min(2 * self._pause, _LONGEST)
            self._head.pause = max(self._head.pause, self._pause)


class HeadDrafter(Drafter):
    """Proposes what the model's own head drafted."""

    name = "mtp"
    reads = TargetReads(hidden=True)

    def __init__(self) -> None:
        self.acceptance = Acceptance()  # of all requests
        self.pause = _SHORTEST  # of a request that begins
        self.step = 0  # that is planned next
        self.measures = True  # nothing is drafted, so that plain steps are timed

    def planned(self, step: int) -> None:
        self.step = step + 1
        self.measures = self.step % _PERIOD < _PLAIN

    def end_of_pause(self, steps: int) -> int:
        """Return the step in which a pause of so many steps ends that begins now."""
        return (self.step // max(1, steps) + 1) * steps

    def begin(self, sequence: Sequence) -> RequestDrafts:
        return HeadDrafts(self)

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        proposals: list[Proposal | None] = []
        for row in rows:
            drafts = self._of(row.sequence)
            has_draft = drafts is not None and drafts.draft >= 0 and row.skip == 0
            proposals.append(Proposal([drafts.draft], [drafts.chance]) if drafts is not None and has_draft else None)
        return proposals

    def computed(self, sequence: Sequence, row: Row, result: RowResult) -> None:
        if (drafts := self._of(sequence)) is not None:
            for token in DRAFTED.of(result):
                drafts.computed(token)

    def _of(self, sequence: Sequence) -> HeadDrafts | None:
        drafts = sequence.drafting.get(self.name)
        return drafts if isinstance(drafts, HeadDrafts) else None
