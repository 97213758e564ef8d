"""Bounds how long steps wait for grammars: rows of slow ones wait outside the batch until others have had their time.

The masks of a step are found while the model runs, and moving grammars on is quick. An ambiguous grammar takes tens of
milliseconds for both, and every row of its step would wait. So the rows of a step run while their grammars, the
quickest first, take at most half of what a step takes. Of the others one runs now and then: together they get a fifth
of the time.
"""

from __future__ import annotations

from rekindle._src.core.records import StepPlan, StepResult
from rekindle._src.scheduling.sequence import Sequence

LEAST = 0.002  # seconds that the grammars of a step may always take
SHARE = 0.25  # seconds of slow grammars for a second of other steps
LONGEST = 0.05  # seconds that slow grammars take for one step where nothing else runs
_DEBT = 1.0  # seconds at most: where nothing else runs, nobody waits for them
_OLDER = 0.125  # how fast a step's usual time follows the latest one


class SlowGrammars:
    """Chooses among the rows that could run; owned by the scheduler."""

    def __init__(self) -> None:
        self._usual = 2 * LEAST  # seconds that a step takes when it does not wait for grammars
        self._credit = 0.0  # seconds that slow grammars may take now; negative after one has run
        self._turn = 0

    @property
    def allowed(self) -> float:
        """Seconds that the grammars of a step may take."""
        return max(LEAST, self._usual / 2)

    def split(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those of a step's sequences that run now, and those that wait outside the batch, in their order."""
        if sum(map(_seconds, sequences)) <= self.allowed:
            return sequences, []
        total, waiting = 0.0, set[Sequence]()
        for sequence in sorted(sequences, key=_seconds):
            total += _seconds(sequence)
            if total > self.allowed:
                waiting.add(sequence)
        if self._credit >= 0:
            self._runs(next_one := min(waiting, key=_turn))
            waiting.discard(next_one)
        return [one for one in sequences if one not in waiting], [one for one in sequences if one in waiting]

    def alone(self, waiting: list[Sequence]) -> list[Sequence]:
        """Those that run where nothing else does."""
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
        """Count what the grammars of a step have taken."""
        if not plan.rows:
            return
        seconds = sum(row.guided.seconds for row in result.rows if row.guided is not None)
        if seconds <= result.device_seconds / 2:
            self._usual += _OLDER * (result.device_seconds - self._usual)
        if seconds > self.allowed:
            self._credit = max(-_DEBT, self._credit - seconds)
        else:
            self._credit = min(0.0, self._credit + SHARE * result.device_seconds)

    def _runs(self, sequence: Sequence) -> None:
        self._turn += 1
        if sequence.forced is not None:
            sequence.forced.turn = self._turn


def _seconds(sequence: Sequence) -> float:
    return 0.0 if sequence.forced is None else sequence.forced.seconds


def _turn(sequence: Sequence) -> int:
    return 0 if sequence.forced is None else sequence.forced.turn
