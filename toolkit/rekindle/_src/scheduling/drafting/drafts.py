"""The draft rows of a step: tokens that are proposed for its requests, computed along with their next ones.

A draft is a decode row like any other, one position further on, with the proposed token as its input. All rows write
their keys and values before attention reads, and a draw depends on seed and position alone, so a draft row samples what
the request would have sampled there, provided that all drafts before it are accepted. The first rejected draft ends the
chain; the entries of later rows lie past the request's length, where the next step overwrites them.

How far a request got is known when such a step is committed, so no step is planned before that. The device waits for
the host once, and the drafts have to gain more than that wait costs every row of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items

from rekindle._src.core.records import (
    NOBODY,
    DraftTask,
    EntryLag,
    Row,
    StepPlan,
    StepResult,
)
from rekindle._src.programs.buckets import SMALLEST_ROWS, padded_rows
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle._src.scheduling.drafting.drafter import DraftableRow, DraftCounts, Drafter
from rekindle._src.scheduling.drafting.proposal import Proposal
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.sequence import Limits, Sequence

# Up to this number of rows one more row is taken to cost nothing, until it is measured. Further ones replace padding.
FEW_ROWS = 8
_LEAST_LIKELY = 0.05  # a draft that is accepted less often is none
_MOST = 7  # drafts of a request in a step, where no option says how many


class Drafts:
    """Adds draft rows to a step after its other rows are planned."""

    def __init__(self, limits: Limits, ledger: PageLedger, drafters: Iterable[Drafter]) -> None:
        self._limits, self._ledger = limits, ledger
        # A state can be taken back to before a rejected draft if there are slots for those after each draft.
        self._drafters = tuple(drafters) if ledger.sides.drafts else ()
        self._working = tuple(one for one in self._drafters if type(one).tasks is not Drafter.tasks)
        most = next((one.most for one in self._drafters if one.most), _MOST)
        self._most = min([most, *(one.bound for one in self._drafters)])
        self._costs = StepCosts()
        self._waits = -1  # the step whose plan waited for drafts
        self._alone = -1  # the step that was planned while no other ran
        self.drafted: Counter[str] = Counter()  # drafts of committed steps, by drafter
        self.accepted: Counter[str] = Counter()

    def extend(
        self,
        sequences: list[Sequence],
        rows: list[Row],
        budget: int,
        *,
        mixed: bool,
        ready: Callable[[int], int] = lambda rows: rows,
    ) -> None:
        """Insert draft rows after some of a step's decode rows, within `budget` tokens and the pages that are free.

        `ready` returns how many of so many further rows the step has a program for.
        """
        if not self._drafters:
            return
        for sequence in sequences:
            if not sequence.drafting.begun:
                self._begin(sequence)
        largest = max(self._limits.max_requests, SMALLEST_ROWS)
        room = min(budget, largest - len(rows))
        for drafter in self._drafters:
            drafter.crowded = room <= 0
        if room <= 0:
            return
        proposals = self._proposals(sequences)
        if not proposals:
            return
        room = ready(min(room, sum(len(proposal.tokens) for _, proposal in proposals.values())))
        if not room:
            return  # their program is being made, which says nothing of what drafts bring
        counts = self._counts(proposals, len(rows), room, mixed=mixed)
        for sequence, (drafter, proposal) in proposals.items():
            if not counts[sequence]:
                sequence.drafting.by_name[drafter.name].declined()
                continue
            room = self._ledger.sides.draft_room(counts.get(sequence, 0))
            reached = self._ledger.cover(sequence, max(room, drafter.reach), self._limits.max_requests)
            if count := min(room, reached) if reached >= drafter.reach else 0:
                sides = self._ledger.sides.drafts_of(sequence, count)
                after = sequences.index(sequence) + 1
                drafts = sequence.draft_rows(proposal.tokens[:count], sides, drafter.name)
                rows[after:after] = drafts
                sequences[after:after] = [sequence] * len(drafts)

    def tasks(self, sequences: Items[Sequence], rows: Items[Row]) -> tuple[DraftTask, ...]:
        """Return the tasks of drafters on the device before a step with decode `rows` of `sequences`."""
        return tuple(task for one in self._working if one.awake for task in one.tasks(sequences, rows))

    def planned(self, step: int, *, alone: bool, waited: bool) -> None:
        """Note that a step was planned `alone`, while none ran, and if that is because it `waited` for drafts."""
        if alone:
            self._alone = step
        if waited:
            self._waits = step
        for drafter in self._drafters:
            drafter.planned(step)

    def awaited(self, sequences: Items[Sequence]) -> frozenset[str]:
        """Return the requests with a token that a drafter needs before the next step is planned."""
        return frozenset([one.id for one in sequences if one.drafting.awaited]) if self._working else NOBODY

    def entries(self, sequences: Items[Sequence], rows: Items[Row], *, enters: bool) -> Mapping[int, EntryLag] | None:
        """Return the entries that a step computes for a drafter; see `Drafter.entries`."""
        entries = (one.entries(sequences, rows, enters=enters) for one in self._working)
        return next((each for each in entries if each is not None), None)

    def learn(self, sequences: Items[Sequence], plan: StepPlan, result: StepResult, taken: Items[bool]) -> None:
        """Count the drafts and the cost of a committed step. `taken` says which rows became part of their texts."""
        waited, entered = plan.step == self._waits, plan.entries is not None
        if not plan.prefill and plan.steps == 1 and (waited or (plan.step != self._alone and not entered)):
            self._costs.learn(len(plan.decode), result, waited=waited)
        if not plan.drafted:
            return
        drafted, accepted = Counter[Sequence](), Counter[Sequence]()
        for sequence, row, was_right in zip(sequences, plan.rows, taken, strict=True):
            if row.draft:
                drafted[sequence] += 1
                accepted[sequence] += bool(was_right)
        for sequence, count in drafted.items():
            assert sequence.drafting.proposer, f"{sequence.id} has drafts from nowhere"
            sequence.drafting.by_name[sequence.drafting.proposer].learn(count, accepted[sequence])
            self.drafted[sequence.drafting.proposer] += count
            self.accepted[sequence.drafting.proposer] += accepted[sequence]
            sequence.drafts_checked()
            for drafter in self._working:
                drafter.checked(sequence)
            self._ledger.sides.checked(sequence)

    def statistics(self) -> dict[str, DraftCounts]:
        """Return the counts of each drafter by its name."""
        return {name: DraftCounts(count, self.accepted[name]) for name, count in self.drafted.items()}

    def end(self, sequence: Sequence) -> None:
        """Note that a request has ended."""
        for drafter in self._drafters if sequence.drafting.by_name else self._working:  # entries begin with the prompt
            drafter.end(sequence)

    def forget(self) -> None:
        """Forget all texts: the session's cache was cleared."""
        for drafter in self._drafters:
            drafter.forget()

    def _proposals(self, sequences: Items[Sequence]) -> dict[Sequence, tuple[Drafter, Proposal]]:
        """Return the proposal for each sequence from the first drafter that has one."""
        found: dict[Sequence, tuple[Drafter, Proposal]] = {}
        for drafter in self._drafters:
            if not drafter.awake:
                continue
            name, rows = drafter.name, list[DraftableRow]()
            for one in sequences:
                drafts, skip = one.drafting.by_name.get(name), one.epoch.planned - one.tokens.known
                if drafts is not None and drafts.ready and one.remaining > 0 and skip >= 0 and one not in found:
                    rows.append(DraftableRow(one, skip, min(self._most, one.remaining)))
            if not rows:
                continue
            for row, proposal in zip(rows, drafter.propose(rows), strict=True):
                if proposal is not None:
                    found[row.sequence] = drafter, proposal
        return found

    def _begin(self, sequence: Sequence) -> None:
        sequence.drafting.begun = True
        begun = [(drafter.name, drafter.begin(sequence)) for drafter in self._drafters]
        sequence.drafting.by_name = {name: drafts for name, drafts in begun if drafts is not None}

    def _counts(
        self, proposals: dict[Sequence, tuple[Drafter, Proposal]], rows: int, room: int, *, mixed: bool
    ) -> Counter[Sequence]:
        """Return the drafts of each sequence: the likeliest ones of all, as many as pay."""
        slots: list[tuple[float, int, Sequence]] = []
        for sequence, (_, proposal) in proposals.items():
            chance = 1.0
            for place, one in enumerate(proposal.chances):
                chance *= one
                if chance < _LEAST_LIKELY:
                    break
                slots.append((-chance, place, sequence))
        slots.sort(key=_likelier)
        del slots[room:]
        most = self._limits.max_requests
        free = min(room, max(padded_rows(rows, most, mixed=mixed), min(FEW_ROWS, most)) - rows)
        count = self._costs.best(rows, [-slot[0] for slot in slots], free, measured=not mixed)
        return Counter(slot[2] for slot in slots[:count])


def _likelier(slot: tuple[float, int, Sequence]) -> tuple[float, int]:
    return slot[0], slot[1]
