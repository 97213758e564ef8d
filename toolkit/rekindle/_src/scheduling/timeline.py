"""The timeline of a request: the phases between its submission and its end, with their seconds and reasons.

A `Timeline` keeps one mark for each change, so that it costs nothing per step. The seconds that steps waited for a
program are cut out of its phases when they are read.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rekindle._src.core import words
from rekindle._src.core.activity import WaitSpan
from rekindle._src.core.drawable import Record
from rekindle._src.core.records import Timings, Usage


class PhaseKind(enum.StrEnum):
    """The kind of one phase of a request: its work, or its reason to wait."""

    INTAKE = "intake"  # its chat was rendered, its text tokenized, its grammar compiled
    QUEUED = "queued"  # waited for its turn, a slot, or room on the device
    PREFIX = "waited for a prefix"  # another request computed the beginning that both share
    PAGES = "waited for pages"  # too few were free
    LOADING = "loaded pages"  # cached pages were read from disk
    COMPILING = "compiled"  # it waited for a program, which was compiled or loaded
    PREFILL = "prefill"  # computed its prompt
    DECODE = "decode"  # generated tokens
    PREEMPTED = "preempted"  # gave its pages up, and waited to resume


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Phase(Record):
    """One phase of a request; its seconds are counted from the request's submission."""

    kind: PhaseKind
    start: float  # when it began; of several phases, the first
    seconds: float
    reason: str = ""
    tokens: int = 0  # computed in prefill, or generated in decode
    times: int = 1  # phases of this kind that are summed up here: only the first and latest 100 are kept apart

    _seconds = ("start", "seconds")

    @property
    def words(self) -> str:
        """Its reason and its tokens."""
        parts = [self.reason]
        if self.tokens:
            rate = (
                f", {self.tokens / self.seconds:,.1f} per s" if self.kind is PhaseKind.DECODE and self.seconds else ""
            )
            parts.append(f"{words.count(self.tokens, 'token')}{rate}")
        if self.times > 1:
            parts.append(f"{self.times} times")
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        return f"at {self.start:8.3f} s {self.seconds:9.3f} s  {self.kind:<19}  {self.words}".rstrip()


class _Mark(NamedTuple):
    at: float
    kind: PhaseKind
    reason: str
    computed: int
    generated: int


_SHORTEST = 0.001  # seconds; shorter waits for programs (a step may have several) stay in their phase
_KEPT = 100  # phases at either end that are kept apart, where a request has more


class Timeline:
    """The changes of one request so far, by `time.perf_counter()`."""

    __slots__ = ("_marks", "_middle", "_summed", "began")

    def __init__(self, arrival: float) -> None:
        """Begin at a request's submission; 0 if that was not in this process."""
        now = time.perf_counter()
        self.began = arrival if 0.0 < arrival <= now else now
        self._marks: list[_Mark] = []
        self._summed: dict[PhaseKind, Phase] = {}  # phases in the middle of a long life
        self._middle: _Mark | None = None  # the first of these
        if self.began < now:
            self._marks.append(_Mark(self.began, PhaseKind.INTAKE, "", 0, 0))

    @property
    def kind(self) -> PhaseKind | None:
        """The kind of the present phase."""
        return self._marks[-1].kind if self._marks else None

    def enter(self, kind: PhaseKind, reason: str = "", *, computed: int = 0, generated: int = 0) -> None:
        """Begin a phase; if it is of the present kind, only change its reason."""
        marks = self._marks
        if marks and marks[-1].kind is kind:
            marks[-1] = marks[-1]._replace(reason=reason)
            return
        if kind is PhaseKind.COMPILING and marks and time.perf_counter() - marks[-1].at < _SHORTEST:
            skipped = marks.pop()  # nothing came of the phase before
            if marks and marks[-1].kind is kind:
                marks[-1] = marks[-1]._replace(reason=reason)
            else:
                marks.append(skipped._replace(kind=kind, reason=reason))
            return
        marks.append(_Mark(time.perf_counter() if marks else self.began, kind, reason, computed, generated))
        if len(marks) > 3 * _KEPT:
            self._sum_up()

    def phases(
        self, end: float | None, waits: Sequence[WaitSpan] = (), *, computed: int = 0, generated: int = 0
    ) -> tuple[Phase, ...]:
        """Return the phases until `end`, by default until now, with the `waits` for programs cut out of them."""
        marks, began = self._marks, self.began
        if not marks:
            return ()
        stop = _Mark(time.perf_counter() if end is None else end, marks[-1].kind, "", computed, generated)
        if self._middle is None:
            phases = [*self._between(marks, stop)]
        else:
            first, latest = self._between(marks[:_KEPT], self._middle), self._between(marks[_KEPT:], stop)
            phases = [*first, *self._summed.values(), *latest]
        spans = _merged(wait for wait in waits if wait.stop > began and wait.start < stop.at)
        return tuple(part for phase in phases for part in _cut(phase, began, spans))

    def _between(self, marks: Sequence[_Mark], stop: _Mark) -> Iterator[Phase]:
        for mark, following in itertools.pairwise((*marks, stop)):
            tokens = 0
            if mark.kind is PhaseKind.PREFILL:
                tokens = following.computed - mark.computed
            elif mark.kind is PhaseKind.DECODE:
                tokens = following.generated - mark.generated
            start, seconds = mark.at - self.began, max(0.0, following.at - mark.at)
            yield Phase(mark.kind, start, seconds, mark.reason, max(0, tokens))

    def _sum_up(self) -> None:
        """Sum up the phases in the middle, by their kind."""
        middle, after = self._marks[_KEPT:-_KEPT], self._marks[-_KEPT]
        if self._middle is None:
            self._middle = middle[0]
        del self._marks[_KEPT:-_KEPT]
        for phase in self._between(middle, after):
            before = self._summed.get(phase.kind)
            if before is not None:
                phase = dataclasses.replace(
                    before,
                    seconds=before.seconds + phase.seconds,
                    tokens=before.tokens + phase.tokens,
                    times=before.times + 1,
                )
            self._summed[phase.kind] = phase


def phases_of(timings: Timings, usage: Usage) -> tuple[Phase, ...]:
    """Return the phases of a request without a timeline, from its figures: queued, prefill and decode."""
    before = timings.compiling - timings.compiling_later
    computed = usage.prompt_tokens - usage.cached_tokens
    phases = [
        Phase(PhaseKind.QUEUED, 0.0, timings.queued),
        Phase(PhaseKind.COMPILING, timings.queued, before),
        Phase(PhaseKind.PREFILL, timings.queued + before, timings.first_token - timings.queued - before, "", computed),
        Phase(PhaseKind.COMPILING, timings.first_token, timings.compiling_later),
        Phase(
            PhaseKind.DECODE,
            timings.first_token + timings.compiling_later,
            timings.total - timings.first_token - timings.compiling_later,
            "",
            usage.completion_tokens,
        ),
    ]
    return tuple(phase for phase in phases if phase.seconds > 0)


def _merged(waits: Iterable[WaitSpan]) -> list[WaitSpan]:
    """Join waits that follow each other at once, as within one step; leave out spans too short to be shown."""
    spans: list[WaitSpan] = []
    for wait in waits:
        if spans and wait.start - spans[-1].stop < _SHORTEST:
            spans[-1] = WaitSpan(spans[-1].start, wait.stop, f"{spans[-1].program}, {wait.program}")
        else:
            spans.append(wait)
    return [span for span in spans if span.stop - span.start >= _SHORTEST]


def _cut(phase: Phase, began: float, spans: Sequence[WaitSpan]) -> Iterator[Phase]:
    """Yield a phase's parts between waits for programs, and these waits. Its tokens belong to the last part."""
    start, stop = phase.start, phase.start + phase.seconds
    if phase.times == 1:
        for span in spans:
            low, high = max(start, span.start - began), min(stop, span.stop - began)
            if high - low < _SHORTEST:
                continue
            if low > start:
                yield dataclasses.replace(phase, start=start, seconds=low - start, tokens=0)
            yield Phase(PhaseKind.COMPILING, low, high - low, f"program {words.shorten(span.program, 80)}")
            start = high
    if start < stop or start == phase.start or phase.tokens:
        yield phase if start == phase.start else dataclasses.replace(phase, start=start, seconds=stop - start)


def summary(phases: Iterable[Phase]) -> str:
    """Return the seconds of each kind of phase in one line, in order of first appearance."""
    sums: dict[PhaseKind, float] = {}
    for phase in phases:
        sums[phase.kind] = sums.get(phase.kind, 0.0) + phase.seconds
    return ", ".join(f"{kind} {seconds:.3g} s" for kind, seconds in sums.items())
