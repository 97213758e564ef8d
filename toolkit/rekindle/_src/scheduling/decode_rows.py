"""The decode rows of a step: drafts are added to them (`Drafts`), and slow ones wait for a later step (`SlowRows`).

Speculative decoding: draft rows compute proposed tokens of a request along with its next one. Proposals come from
prompt lookup, and from grammars: a fifth of a text in JSON is forced. A grammar forces text, which the model may spell
with other tokens than those proposed; then its own spelling counts, as with any draft.

A draft is a decode row like any other, one position further on, with the proposed token as its input. All rows write
their keys and values before attention reads, and a draw depends on seed and position alone, so a draft row samples what
the request would have sampled there, provided that all drafts before it are accepted. The first rejected draft ends the
chain; the entries of later rows lie past the request's length, where the next step overwrites them.

How far a request got is known when such a step is committed, so no step is planned before that. The device waits for
the host once, and the drafts have to gain more than that wait costs every row of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from rekindle._src.core.records import Row, StepPlan, StepResult
from rekindle._src.core.report_kinds import GUIDED
from rekindle._src.programs.buckets import padded_rows
from rekindle._src.scheduling.followers import ForcedTokens, PromptLookup
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.sequence import Limits, Sequence

# Up to this number of rows one more row costs little. Beyond it drafts only replace padding: that is free except with
# native products, which skip padding, so drafts have to be likely there.
FEW_ROWS = 8
# Cost of the wait as a share of a step: 0.14 with 135M parameters on two cores, a whole step with 4M. Drafts have to
# gain that much for each row of the step. With 4M, four requests at once still end a tenth later.
WAIT_COST = 1.0


class Drafts:
    """Adds draft rows to a step whose other rows are planned."""

    def __init__(self, limits: Limits, ledger: PageLedger) -> None:
        self._limits, self._ledger = limits, ledger
        self.drafted = 0  # rows whose steps were committed

    def extend(self, sequences: list[Sequence], rows: list[Row], budget: int, *, mixed: bool) -> None:
        """Insert draft rows after some of a step's decode rows, within `budget` tokens and the pages that are free."""
        drafting = [sequence for sequence in sequences if self._can_draft(sequence)]
        counts = self._counts(drafting, len(rows), budget, mixed=mixed) if drafting else {}
        for sequence in drafting:
            if count := self._within_pages(sequence, counts.get(sequence, 0)):
                sides = self._ledger.sides.drafts_of(sequence, count)
                after = sequences.index(sequence) + 1
                drafts = sequence.drafts(_drafter(sequence).propose(_skip(sequence), count), sides)
                rows[after:after] = drafts
                sequences[after:after] = [sequence] * len(drafts)

    def learn(self, sequences: Items[Sequence], rows: Items[Row], right: Items[bool]) -> None:
        """Tell each request's index how many of its drafts a committed step accepted."""
        drafted, accepted = Counter[Sequence](), Counter[Sequence]()
        for sequence, row, was_right in zip(sequences, rows, right, strict=True):
            if row.draft:
                drafted[sequence] += 1
                accepted[sequence] += was_right
        for sequence, count in drafted.items():
            _drafter(sequence).learn(count, accepted[sequence])
            sequence.drafts_checked()
            self.drafted += count

    def _can_draft(self, sequence: Sequence) -> bool:
        """True if a sequence has drafts to propose; sets the drafter that proposes them."""
        if sequence.forced is None and not self._limits.prompt_lookup:
            return False
        if not self._ledger.sides.drafts:
            return False  # what its side caches hold can't be taken back to before a rejected draft
        sampling = sequence.request.sampling
        if sequence.remaining <= 0 or sampling.penalised or sampling.processors:
            return False  # penalties and processors read earlier tokens, and the device does not count drafts
        if sequence.forced is not None and sequence.forced.ready(_skip(sequence)):
            sequence.drafter = sequence.forced
            return True
        if not self._limits.prompt_lookup:
            return False
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(sequence.tokens(0, sequence.known))
        sequence.drafter = sequence.lookup
        return sequence.lookup.ready()

    def _counts(self, drafting: list[Sequence], rows: int, budget: int, *, mixed: bool) -> dict[Sequence, int]:
        """Return the drafts of each sequence: one more than will likely be accepted, then up to the program's size."""
        max_rows = self._limits.max_requests
        room = min(budget, max(padded_rows(rows, max_rows, mixed=mixed), min(FEW_ROWS, max_rows)) - rows)
        most = self._limits.prompt_lookup
        bounds = {s: min(_drafter(s).max_drafts(_skip(s), most), s.remaining) for s in drafting}
        expected = {s: _drafter(s).expected(_skip(s)) for s in drafting}
        counts = _shared({s: min(bound, 1 + int(expected[s])) for s, bound in bounds.items()}, room)
        if sum(min(count, expected[s]) for s, count in counts.items()) < WAIT_COST * rows:
            return {}
        first = sum(counts.values())
        return _shared(bounds, min(room, padded_rows(rows + first, max_rows, mixed=mixed) - rows))

    def _within_pages(self, sequence: Sequence, count: int) -> int:
        """Return how many of `count` drafts have pages. Takes one only while each other slot could take one too."""
        size, slots = self._limits.page_size, self._limits.max_requests
        while sequence.planned + count > sequence.num_pages * size:
            if self._ledger.available <= slots or not self._ledger.grow(sequence):
                return sequence.num_pages * size - sequence.planned
        return count


def _drafter(sequence: Sequence) -> PromptLookup | ForcedTokens:
    assert sequence.drafter is not None, f"{sequence.id} has drafts from nowhere"
    return sequence.drafter


def _skip(sequence: Sequence) -> int:
    """Return how many tokens lie between the known ones and the first draft: those that steps in flight will bring."""
    return sequence.planned - sequence.known


def _shared(bounds: dict[Sequence, int], room: int) -> dict[Sequence, int]:
    """Distribute `room` one by one, up to the bound of each sequence."""
    counts = dict.fromkeys(bounds, 0)
    while room > 0:
        below = [s for s, bound in bounds.items() if counts[s] < bound][:room]
        if not below:
            break
        for sequence in below:
            counts[sequence] += 1
        room -= len(below)
    return counts


ORDINARY = 0.0001  # seconds of a processor for a token that no grammar waits for; most take a third of it
PART = 0.25  # of a step's usual time
SHARE = 0.25  # seconds of slow grammars for a second of other steps
LONGEST = 0.05  # seconds that slow grammars take for one step where nothing else runs
_DEBT = 1.0  # seconds at most: where nothing else runs, no request waits for them
_OLDER = 0.125  # how fast a step's usual time follows the latest one
_GROWTH = 2.0  # of the usual time, which a step that was held up does not change by more


class SlowRows:
    """Bounds how long steps wait for the host's part of their rows: slow rows wait until others have had their time.

    The masks of a step are computed while the model runs, and advancing a grammar is quick. An ambiguous grammar takes
    up to tens of milliseconds for both, and so does the search for a short end of a text: every row of its step would
    wait. So slow rows run, the quickest first, while they and all others take at most a quarter of what a step takes
    without them. Of the rest one runs now and then: together they get a fifth of the time.
    """

    def __init__(self) -> None:
        self._usual = 0.001  # seconds that a step takes without its grammars
        self._credit = 0.0  # seconds that slow grammars may take now; negative after one has run
        self._turn = 0

    @property
    def allowed(self) -> float:
        """Seconds that the grammars of a step may take, if one of them is slow."""
        return PART * self._usual

    def split(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Split a step's sequences into those that run now and those that wait outside the batch; keeps their order."""
        if all(_seconds(sequence) <= ORDINARY for sequence in sequences):
            return sequences, []
        total, waiting = 0.0, set[Sequence]()
        for sequence in sorted(sequences, key=_seconds):
            total += (seconds := _seconds(sequence))
            if seconds > ORDINARY and total > self.allowed:
                waiting.add(sequence)
        if waiting and self._credit >= 0:
            self._runs(chosen := min(waiting, key=_turn))
            waiting.discard(chosen)
        return [s for s in sequences if s not in waiting], [s for s in sequences if s in waiting]

    def alone(self, waiting: list[Sequence]) -> list[Sequence]:
        """Choose the waiting sequences that run where nothing else does."""
        chosen: list[Sequence] = []
        total = 0.0
        for sequence in sorted(waiting, key=_turn):
            total += _seconds(sequence)
            if chosen and total > LONGEST:
                break
            chosen.append(sequence)
            self._runs(sequence)
        return chosen

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Record the time of a committed step and of its grammars."""
        if not plan.rows:
            return
        self._usual += _OLDER * (min(result.seconds, _GROWTH * self._usual) - self._usual)
        times = [report.seconds for row in result.rows if row.reports for report in GUIDED.of(row)]
        slow = sum(seconds for seconds in times if seconds > ORDINARY)
        if slow and sum(times) > self.allowed:
            self._credit = max(-_DEBT, self._credit - slow)
        else:
            self._credit = min(0.0, self._credit + SHARE * result.seconds)

    def _runs(self, sequence: Sequence) -> None:
        self._turn += 1
        if sequence.forced is not None:
            sequence.forced.turn = self._turn


def _seconds(sequence: Sequence) -> float:
    return 0.0 if sequence.forced is None else sequence.forced.cost


def _turn(sequence: Sequence) -> int:
    return 0 if sequence.forced is None else sequence.forced.turn
