"""Rows with ready programs: they run in a step now, while others wait for a program that is being made.

A step is one program, and compiling a further one takes seconds. So each row is asked about before it joins a step. The
rows of the step before come first: a stream never waits because of a row that came later and needs what it doesn't,
such as log-probabilities. Where programs are made ahead, in the background, it does not wait either for a row or for
drafts that make the step larger than every program that is ready; elsewhere the step makes its program then. Where no
stream runs, the step waits for its program.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple, Protocol

from rekindle._src.core.activity import ProgramWait
from rekindle._src.core.records import Request, Status
from rekindle._src.programs.buckets import StepSize
from rekindle._src.scheduling.sequence import Limits, Sequence
from rekindle._src.scheduling.timeline import PhaseKind

_LONGEST = 1.0  # seconds between two plans that count as a wait: in a longer time the session was paused or stopped


class WantedLike(Protocol):
    """A program to make."""

    @property
    def name(self) -> str: ...


class FitLike(Protocol):
    """True `ready`: a step can run now. `wanted` are the programs to make so that it runs as fast as it can."""

    @property
    def ready(self) -> bool: ...
    @property
    def wanted(self) -> tuple[Any, ...]: ...


class StepProgramsLike(Protocol):
    """The programs of steps: `programs.demand.StepPrograms`, or a fake."""

    @property
    def ahead(self) -> bool:
        """True if programs of all sizes are made in the background, so that no step has to make its own."""

    def need(self, request: Request, start: int, length: int, *, samples: bool, decodes: bool) -> Any:
        """Return a row's needs of its step's program; equal needs share one object."""

    def fit(self, needs: frozenset[Any], size: StepSize) -> FitLike:
        """Return the programs for a step of this size and rows with these needs."""
        ...

    def drafts(self) -> bool:
        """True if steps with drafts can run."""
        ...

    def repeats(self, needs: frozenset[Any], size: StepSize) -> FitLike:
        """Return the program that repeats decode steps of this size, for rows with these needs."""
        ...

    def want(self, wanted: tuple[Any, ...]) -> object:
        """Make these programs in the background, instead of earlier requested ones."""

    def error(self, wanted: Any) -> Exception | None:
        """Return why a program could not be made."""

    def forget(self, wanted: Any) -> object:
        """Let a program be tried again when it is wanted again."""


class EveryRow:
    """The rows of a scheduler with steps that need no programs, or wait for them: all rows join."""

    waiting = False  # True while sequences wait for a program

    def begin(self, sequences: list[Sequence], *, now: bool) -> list[Sequence]:
        """Begin a step. Return the sequences that decode in it; all of them with `now`."""
        return sequences

    def takes(self, sequence: Sequence, length: int) -> bool:
        """True if a row of `length` tokens joins the step."""
        return True

    def drafts(self) -> bool:
        """True if the step may have drafts."""
        return True

    def room(self, rows: int) -> int:
        """Return how many of `rows` drafts the step has a program for."""
        return rows

    def repeats(self, steps: int) -> int:
        """Return how many of `steps` decode steps with the rows that joined there is a program for."""
        return steps

    def end(self) -> None:
        """End a step: its rows are planned."""

    def take_failed(self) -> list[tuple[Sequence, Exception]]:
        """Return the sequences with a program that could not be made, each once and with the error."""
        return []


class _Row(NamedTuple):
    sequence: Sequence
    need: Any
    length: int  # of a prefill; 0 in a decode row


class ReadyRows(EveryRow):
    """Rows with other needs than the running streams wait until their program is ready."""

    def __init__(self, programs: StepProgramsLike, limits: Limits, program_wait: ProgramWait) -> None:
        self._programs, self._limits, self._program_wait = programs, limits, program_wait
        self._streams: frozenset[Sequence] = frozenset()  # decoded in the step before
        self._waits: dict[Sequence, float] = {}  # when each was last seen waiting, by time.perf_counter()
        self._failed: list[tuple[Sequence, Exception]] = []
        self._now = self._making = self._stuck = False
        self._usual: frozenset[Any] = frozenset()  # the needs of the streams
        self._needs, self._size = self._usual, StepSize()  # of the step
        self._decoding: set[Sequence] = set()  # that joined it
        self._wanted: tuple[Any, ...] = ()  # for the rows that joined it
        self._held: list[_Row] = []

    @property
    def waiting(self) -> bool:  # type: ignore[override]
        return self._making and bool(self._waits)

    def begin(self, sequences: list[Sequence], *, now: bool) -> list[Sequence]:
        self._clear()
        alone = not self._waits and self._streams.isdisjoint(sequences)
        self._now = now = now or self._stuck or alone
        if now:
            self._decoding.update(sequences)
            return sequences
        self._usual = frozenset({_decoding(self._programs, one) for one in sequences if one in self._streams})
        if self._streams.issuperset(sequences):  # as in most steps
            self._needs, self._size = self._usual, StepSize(len(sequences))
            self._decoding.update(sequences)
            return sequences
        rows = [_Row(sequence, _decoding(self._programs, sequence), 0) for sequence in sequences]
        if not self._join(rows):
            streams = [row for row in rows if row.sequence in self._streams]
            others = [row for row in rows if row.sequence not in self._streams]
            self._add(streams)
            self._held += [row for row in others if not self._join([row])]
            sequences = [sequence for sequence in sequences if sequence in self._decoding]
        return sequences

    def takes(self, sequence: Sequence, length: int) -> bool:
        if self._now:
            return True
        if any(row.sequence is sequence for row in self._held):
            return False  # its prompt's last token is a decode row, which had its turn
        if sequence.decodes:
            row = _Row(sequence, _decoding(self._programs, sequence), 0)
        else:
            samples = sequence.epoch.planned + length >= sequence.epoch.target and sequence.generates
            need = self._programs.need(sequence.request, sequence.epoch.planned, length, samples=samples, decodes=False)
            row = _Row(sequence, need, length)
        if self._join([row]):
            return True
        self._held.append(row)
        return False

    def drafts(self) -> bool:
        return self._programs.drafts()

    def room(self, rows: int) -> int:
        if self._now or not self._programs.ahead:
            return rows
        size, prefills, tokens = self._size
        while rows:
            fit = self._programs.fit(self._needs, StepSize(size + rows, prefills, tokens))
            if fit.ready:
                return rows
            self._wanted = fit.wanted + self._wanted  # the smallest first
            rows //= 2
        return 0

    def repeats(self, steps: int) -> int:
        if self._now or self._held:
            return 1
        fit = self._programs.repeats(self._needs, self._size)
        self._wanted += fit.wanted
        return steps if fit.ready else 1

    def end(self) -> None:
        wanted = self._programs.fit(*self._with(self._held)).wanted if self._held else ()
        if not wanted:  # the program of all of them together may be ready, but the programs of single ones not
            each = (self._programs.fit(*self._with([row])).wanted for row in self._held)
            wanted = next(filter(None, each), ())
        if any(self._programs.error(each) is not None for each in wanted):
            wanted = self._blamed()
        self._programs.want(tuple(dict.fromkeys(wanted + self._wanted)))
        self._making = bool(wanted)
        # Nothing runs and nothing is made: the next step has all rows, and waits for its program.
        self._stuck = bool(self._held) and not wanted and self._size == StepSize()
        self._note([row.sequence for row in self._held], wanted[0].name if wanted else "")
        self._streams = frozenset(self._decoding)

    def take_failed(self) -> list[tuple[Sequence, Exception]]:
        failed, self._failed = self._failed, []
        return failed

    def _clear(self) -> None:
        self._needs, self._size = frozenset(), StepSize()
        self._decoding, self._wanted, self._held = set(), (), []

    def _join(self, rows: Items[_Row]) -> bool:
        """Add rows to the step if it can run with them."""
        needs, size = self._with(rows)
        wanted: tuple[Any, ...] = ()
        if self._programs.ahead or not needs <= self._usual:  # else the step makes its program itself, of a new size
            fit = self._programs.fit(needs, size)
            if not fit.ready:
                return False
            wanted = fit.wanted
        self._add(rows)
        self._wanted = wanted
        return True

    def _add(self, rows: Items[_Row]) -> None:
        """Add rows to the step, which makes its program itself if it is not ready."""
        self._needs, self._size = self._with(rows)
        self._decoding.update(row.sequence for row in rows if not row.length)

    def _with(self, rows: Iterable[_Row]) -> tuple[frozenset[Any], StepSize]:
        """Return the needs and the size of the step with further rows, as far as it has room for them."""
        limits, needs, (count, prefills, tokens) = self._limits, set(self._needs), self._size
        for _, need, length in rows:
            room = limits.max_tokens_per_step - count - tokens
            if room <= 0 or (prefills >= limits.max_prefill_rows if length else count >= limits.max_requests):
                break
            needs.add(need)
            if length:
                prefills, tokens = prefills + 1, tokens + min(length, room)
            else:
                count += 1
        return frozenset(needs), StepSize(count, prefills, tokens)

    def _blamed(self) -> tuple[Any, ...]:
        """Fail each row with a program of its own that could not be made. Return the programs that the others need."""
        wanted: list[Any] = []
        failed: list[Any] = []
        for row in self._held:
            own = self._programs.fit(*self._with([row])).wanted
            error = next((error for each in own if (error := self._programs.error(each)) is not None), None)
            if error is not None:
                self._failed.append((row.sequence, error))
                failed += own
            else:
                wanted += own
        for each in failed:
            self._programs.forget(each)
        return tuple(wanted)

    def _note(self, held: list[Sequence], program: str) -> None:
        """Count the waits of sequences, and show them."""
        now = time.perf_counter()
        for sequence, since in self._waits.items():
            if not sequence.ended:
                self._program_wait.add(sequence.id, min(now - since, _LONGEST))
        for sequence in held:
            sequence.enter(PhaseKind.COMPILING, f"waits for program {program}, which is being compiled")
        for sequence in self._waits.keys() - held:
            if not sequence.ended and sequence.timeline.kind is PhaseKind.COMPILING:
                sequence.enter(PhaseKind.PREFILL if sequence.status is Status.PREFILL else PhaseKind.DECODE)
        self._waits = dict.fromkeys(held, now)
        self._program_wait.announce(program if held else "")


def _decoding(programs: StepProgramsLike, sequence: Sequence) -> Any:
    """Return the need of a sequence's decode row; it may depend on its position."""
    if sequence.need is not None:
        return sequence.need
    need = programs.need(sequence.request, sequence.epoch.planned, 1, samples=True, decodes=True)
    if not sequence.request.extensions.by_position:
        sequence.need = need
    return need
