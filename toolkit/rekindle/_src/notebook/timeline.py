"""The batch over time as a picture: slots from top to bottom, steps from left to right."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from rekindle._src.core import html
from rekindle._src.notebook.recorder import StepRecord

WIDTH, ROW = 720, 9  # pixels
COLOURS = {"prefill": "#d9822b", "decode": "#3d8bcd"}
MOVED = "#9b59b6"


class _Run(NamedTuple):
    """One request in one phase in one slot, from step `first` on."""

    request: str
    kind: str
    first: int


class Timeline:
    """Takes steps one by one, so the cost of a picture does not grow with the number of its steps.

    Coordinates count steps since the first one: the markup of ended runs stays valid while the view box moves.
    Drawing 240 steps of 32 rows anew took 1.4 ms a picture; now each step costs 7 µs once.
    """

    def __init__(self, slots: int, steps: int = 240) -> None:
        self._slots, self._window = slots, steps
        self._count = 0  # steps taken
        self._numbers: deque[int] = deque(maxlen=steps)  # numbers of the shown steps
        self._open: dict[int, _Run] = {}  # by slot
        self._over: deque[tuple[int, str]] = deque()  # last step, markup

    def add(self, step: StepRecord) -> None:
        requests = {slot: (request, kind) for slot, request, kind in step.rows}
        for slot, run in list(self._open.items()):
            if requests.get(slot) != run[:2]:
                self._over.append((self._count, self._rect(slot, run)))
                del self._open[slot]
        for slot, (request, kind) in requests.items():
            if slot not in self._open:
                self._open[slot] = _Run(request, kind, self._count)
        if step.moved:
            self._over.append((self._count + 1, _mark(self._count, step.moved)))
        self._count += 1
        self._numbers.append(step.step)
        while self._over and self._over[0][0] <= self._count - self._window:
            self._over.popleft()

    def _rect(self, slot: int, run: _Run) -> str:
        length = self._count - run.first
        place = f'x="{run.first}" y="{8 + slot * ROW}" width="{length}" height="{ROW - 2}"'
        title = f"{html.escape(run.request)} {run.kind}, {html.count(length, 'step')}"
        return f'<rect {place} fill="{COLOURS[run.kind]}"><title>{title}</title></rect>'

    def draw(self) -> html.Markup:
        """Return the picture as SVG. A mark above a step means that pages moved between tiers."""
        if not self._count:
            return html.line("Nothing has run yet. Requests appear here as bars, in a line for each slot")
        height, width = self._slots * ROW + 8, max(60, len(self._numbers))
        first = self._count - len(self._numbers)
        runs = [markup for _, markup in self._over] + [self._rect(slot, run) for slot, run in self._open.items()]
        legend = " ".join(f'<span style="color:{colour}">■</span> {kind}' for kind, colour in COLOURS.items())
        steps = f"steps {self._numbers[0]}–{self._numbers[-1]}, a line per slot"
        return html.Markup(
            f'<svg width="{WIDTH}" height="{height}" viewBox="{first} 0 {width} {height}" preserveAspectRatio="none" '
            f'style="max-width:100%;background:rgba(128,128,128,.12)">{"".join(runs)}</svg>'
            f'<div style="font-size:85%" title="{html.SLOTS}">{legend} · {steps}</div>'
        )


def _mark(step: int, moved: int) -> str:
    title = f"{html.count(moved, 'page')} moved"
    return f'<rect x="{step}" y="0" width="1" height="4" fill="{MOVED}"><title>{title}</title></rect>'
