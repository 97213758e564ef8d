"""Steps that the device repeats: decode rows for several steps, dispatched at once while nobody waits.

A dispatch costs the host about as much as a step costs the device where the model is small. So each request of a step
gets a row for each of several steps, which follow each other as drafts do, but whose tokens the device hands on itself.
A commit takes them one by one: what lies beyond the end of a request is dropped, as the row is that was planned while
its end was not known. The pages of all of them are there before.

A request that comes meanwhile waits for the steps in flight. So nothing is planned while such a dispatch runs, and it
is bounded: in the number of its steps, and in time, by what a step has usually taken.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle._src.core.records import Row, StepResult
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.sequence import Limits, Sequence

_OLDER = 0.125  # how fast a step's usual time follows the latest one
_GROWTH = 2.0  # of the usual time, which a step that was held up does not change by more


class Repeats:
    """Adds the rows of further steps to a plan of decode rows."""

    def __init__(self, limits: Limits, ledger: PageLedger) -> None:
        self._limits, self._ledger = limits, ledger
        self._most = limits.repeated_steps if ledger.sides.repeats else 1
        self._usual = 0.0  # seconds that a step takes; 0: not known

    def extend(self, sequences: list[Sequence], rows: list[Row], *, ready: Callable[[int], int]) -> int:
        """Insert rows after each of a step's decode rows. Return how many steps the plan has now.

        `ready` returns how many of so many steps there is a program for.
        """
        if self._most == 1 or len(rows) > self._limits.repeated_rows:
            return 1
        steps = min(self._bound(), *(1 + sequence.remaining for sequence in sequences))
        if steps < 2 or not all(map(_repeats, sequences, rows)) or (steps := ready(steps)) < 2:
            return 1
        for sequence in sequences:
            steps = min(steps, 1 + self._ledger.cover(sequence, steps - 1, self._limits.max_requests))
        if steps < 2:
            return 1
        every = [
            (one, row) for one, first in zip(sequences, rows, strict=True) for row in self._rows(one, first, steps)
        ]
        sequences[:], rows[:] = map(list, zip(*every, strict=True))
        return steps

    def learn(self, result: StepResult) -> None:
        """Record the time of a committed step."""
        plan = result.plan
        if self._most == 1 or plan.prefill or not plan.decode or result.device_seconds <= 0:
            return
        seconds = result.device_seconds / plan.steps
        if not self._usual:
            self._usual = seconds
        self._usual += _OLDER * (min(seconds, _GROWTH * self._usual) - self._usual)

    def _bound(self) -> int:
        """Return how many steps a dispatch may have."""
        return int(min(self._most, self._limits.repeated_seconds / self._usual)) if self._usual else self._most

    @staticmethod
    def _rows(sequence: Sequence, first: Row, steps: int) -> list[Row]:
        # The device reads the page table of the first row for all of them.
        return [first._replace(pages=sequence.pages.table()), *(sequence.row(1) for _ in range(steps - 1))]


def _repeats(sequence: Sequence, row: Row) -> bool:
    """True if nothing on the host has to know a token of the sequence before its next one."""
    return row.samples and not row.fresh and sequence.steady and not sequence.drafting.by_name
