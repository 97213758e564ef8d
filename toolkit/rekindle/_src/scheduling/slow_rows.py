"""Rows with slow work on the host: they wait for a later step, so that others don't wait for them."""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.core.records import StepResult
from rekindle._src.scheduling.sequence import Sequence

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
        """Split a step's sequences into running ones and ones that wait outside the batch; keeps their order."""
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

    def learn(self, sequences: Items[Sequence], result: StepResult) -> None:
        """Record the time of a committed step, with these sequences in its rows, and of their host work."""
        if not sequences:
            return
        self._usual += _OLDER * (min(result.seconds / result.plan.steps, _GROWTH * self._usual) - self._usual)
        pairs = zip(sequences, result.rows, strict=True)
        times = [costly.seconds(row) for sequence, row in pairs if (costly := sequence.extensions.costly) is not None]
        slow = sum(seconds for seconds in times if seconds > ORDINARY)
        if slow and sum(times) > self.allowed:
            self._credit = max(-_DEBT, self._credit - slow)
        else:
            self._credit = min(0.0, self._credit + SHARE * result.seconds)

    def _runs(self, sequence: Sequence) -> None:
        self._turn += 1
        if sequence.extensions.costly is not None:
            sequence.extensions.costly.ran(self._turn)


def _seconds(sequence: Sequence) -> float:
    return 0.0 if sequence.extensions.costly is None else sequence.extensions.costly.cost


def _turn(sequence: Sequence) -> int:
    return 0 if sequence.extensions.costly is None else sequence.extensions.costly.turn
