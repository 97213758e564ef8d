"""Views of engines: `session.watch()` and `fleet.watch()`.

The dashboard shows throughput, queue, the batch over time and pages by tier, while requests run. A recorder keeps the
last steps; a timeline draws them, slots from top to bottom and steps from left to right.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from rekindle._src.core import words
from rekindle._src.core.mesh_shape import describe_share
from rekindle._src.core.records import StepResult, WaitingRequest
from rekindle._src.dispatch.engine import Observer
from rekindle._src.notebook.figures import Figure, StepRecord
from rekindle._src.notebook.figures import run as figure_of_run
from rekindle._src.notebook.live import Live, SessionLike, button
from rekindle._src.views import html, style, svg
from rekindle.errors import RekindleError

WIDTH, TALL = 620, 240  # pixels: of the picture, and of all slots unless there are few
ROWS = 3, 14  # pixels of a slot, at least and at most
WAITING = 6  # requests that wait and are shown
NAMED = 4  # requests of a step that its explanation names, of each kind
PAUSE = 8.0  # a pause without steps is drawn as at most so many of the step after it
MOVED = style.SERIES[4]


class Observable(Protocol):
    """Calls functions with every committed step, and knows which requests wait."""

    def waits(self, limit: int) -> list[WaitingRequest]: ...
    def observe(self, observer: Observer) -> None: ...
    def unobserve(self, observer: Observer) -> None: ...


class Dashboard(Live):
    """Draws twice a second if something has changed. It keeps the session open until the view is closed."""

    interval: float = 0.5

    def __init__(self, session: SessionLike, steps_of: Observable, *, steps: int = 240) -> None:
        super().__init__(button("close", "Close", title="Leave the last picture"))
        self._session, self._steps = session, steps_of
        self.recorder: Recorder = Recorder(steps)
        self._timeline = TimelinePicture(session.config.max_requests, steps)
        self._newest: StepRecord | None = None  # the latest step in the timeline
        self._last = ""
        self._seen: Any = None
        steps_of.observe(self.recorder)
        self.start()

    @property
    def ended(self) -> bool:
        return super().ended or self._session.closed

    def stop(self) -> None:
        super().stop()
        if not self._session.closed:
            with contextlib.suppress(RekindleError, ValueError):
                self._steps.unobserve(self.recorder)

    def recorded(self) -> Figure:
        """Return the steps that it has seen, the last 240 at most, as a figure of the run in time to scrub through."""
        return figure_of_run(tuple(self.recorder.steps))

    def draw(self) -> str:
        try:
            figures = self._session.stats().as_dict()
        except RekindleError:  # the session was closed: the last picture stays
            return self._last
        self._take()
        state = figures, self._newest, self.recorder.rate()
        if state == self._seen:  # an idle session costs two calls a second on its loop
            return self._last
        self._seen = state
        cached_tokens, prompt_tokens = figures.get("cached_tokens", 0), figures.get("prompt_tokens", 0)
        shards = [
            f"{number}: {shard.running} running, {shard.waiting} waiting, {shard.pages_free} pages free"
            for number, shard in enumerate(figures.get("shards", ()))
        ]
        drafts = [f"{name}: {counts}" for name, counts in figures.get("drafters", {}).items()]
        parts: list[str] = [
            html.line(
                *self._load(figures),
                f"{cached_tokens / prompt_tokens:.0%} of prompt tokens cached" if prompt_tokens else "",
                words.count(figures.get("compilations", 0), "compilation"),
                words.count(figures["mesh"].size, "device") if "mesh" in figures else "",
                describe_share(figures),
            ),
            *([html.line("data shards", *shards)] if shards else []),
            *([html.line("drafts", *drafts)] if drafts else []),
            self._waiting(figures.get("waiting", 0)),
            self._timeline.draw(),
            *self._memory(figures),
        ]
        self._last = html.block(*parts, title=f"Session over {figures['model']}")
        return self._last

    def _load(self, figures: Mapping[str, Any]) -> list[str]:
        """Return the current load or, at rest, the work so far."""
        running, waiting = figures.get("running", 0), figures.get("waiting", 0)
        slowest = self.recorder.slowest()
        speed = f"{slowest * 1e3:.0f} ms between tokens (p99)" if slowest else ""
        if running or waiting:
            return [f"{self.recorder.rate():,.0f} tokens/s", f"{running} running", f"{waiting} waiting", speed]
        finished, generated = figures.get("finished", 0), figures.get("generated_tokens", 0)
        return ["at rest", f"{words.count(finished, 'request')} finished", words.count(generated, "token"), speed]

    def _take(self) -> None:
        """Give the timeline the steps since the last picture."""
        new_steps = list(takewhile(lambda step: step is not self._newest, reversed(tuple(self.recorder.steps))))
        for step in reversed(new_steps):
            self._timeline.add(step)
        self._newest = new_steps[0] if new_steps else self._newest

    def _waiting(self, count: int) -> str:
        """Return who waits and why, the oldest first."""
        if not count:
            return ""
        try:
            waits = self._steps.waits(WAITING)
        except RekindleError:  # the session was closed
            return ""
        rows = [
            (
                wait.id,
                words.seconds(wait.seconds),
                words.count(wait.prompt_tokens, "token"),
                str(wait.status),
                wait.reason,
            )
            for wait in waits
        ]
        more = html.line(f"and {count - len(rows):,} more") if count > len(rows) else ""
        return html.table(["waits", "for", "prompt", "", "because it"], rows) + more

    def _memory(self, figures: Mapping[str, Any]) -> list[str]:
        """Return a bar for the memory of each tier, with what of it is used."""
        total = figures.get("pages_total", 0)
        pages = {name: figures.get(f"pages_{name}", 0) for name in ("held", "cached", "free")}
        try:
            stats = self._session.cache.stats()
        except RekindleError:  # there is no prefix cache, or the session was closed
            stats = None
        page = stats.page_bytes if stats is not None else 0
        device = {name: _sized(count, page) for name, count in pages.items()}
        bars = [_tier("device", device, pages, style.TIERS["device"], html.PAGES)] if total else []
        tiers = {} if stats is None else {"host": stats.host, "disk": stats.disk}
        for name, tier in tiers.items():
            if tier is not None and tier.budget:
                parts = {"used": float(tier.bytes), "free": float(max(0, tier.budget - tier.bytes))}
                sizes = {key: words.mebibytes(size) for key, size in parts.items()}
                bars.append(
                    _tier(name, sizes, parts, style.TIERS[name], f"{words.count(tier.pages, 'page')} of the cache")
                )
        return [html.line("memory"), *bars] if bars else []


def _sized(pages: int, page_bytes: int) -> str:
    """Return pages in words, with their bytes where they are known."""
    size = f", {words.mebibytes(pages * page_bytes)}" if page_bytes else ""
    return f"{words.count(pages, 'page')}{size}"


def _tier(name: str, words: Mapping[str, str], parts: Mapping[str, float], colour: str, meaning: str) -> str:
    """Return the memory of one tier as one bar, its last part free, with its figures in words next to it."""
    total = sum(parts.values()) or 1.0
    free = list(parts)[-1]
    cells = "".join(
        f'<span title="{html.escape(f"{part}: {words[part]}")}" style="height:10px;width:{100 * size / total:.2f}%;'
        f'background:{style.WASH if part == free else style.shade(colour, 1.0) if place else colour}"></span>'
        for place, (part, size) in enumerate(parts.items())
    )
    bar = f'<div style="display:flex;flex:1;gap:1px;border-radius:3px;overflow:hidden">{cells}</div>'
    said = " · ".join(f"{part} {words[part]}" for part in parts)
    below = f"font-size:{style.TINY};opacity:{style.QUIET};margin-left:calc(4.5em + 8px)"  # where the bar begins
    return (
        f'<div title="{html.escape(meaning)}" style="max-width:{WIDTH}px;margin:2px 0 6px">'
        f'<div style="display:flex;gap:8px;align-items:center;font-size:{style.SMALL}">'
        f'<span style="width:4em;flex:none">{html.escape(name)}</span>{bar}</div>'
        f'<div style="{below}">{html.escape(said)}</div></div>'
    )


class Recorder:
    """Remembers the last steps. It is called on the session's loop after each step and read from any thread."""

    def __init__(self, steps: int = 240, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.steps: deque[StepRecord] = deque(maxlen=steps)
        self._gaps: deque[float] = deque(maxlen=steps)
        self._last: tuple[float, set[str]] = (0.0, set())

    def __call__(self, result: StepResult) -> None:
        plan = result.plan
        rows = [(row.slot, row.request.id, "prefill") for row in plan.prefill]
        rows += [(row.slot, row.request.id, "decode") for row in plan.first_decode if not row.draft]
        now, requests = self._clock(), {row[1] for row in rows}
        busy = result.device_seconds
        if not requests.isdisjoint(self._last[1]):
            busy = now - self._last[0]
            self._gaps.append(busy)
        self._last = now, requests
        self.steps.append(
            StepRecord(
                at=now,
                step=plan.step,
                rows=tuple(rows),
                sampled=result.sampled,
                computed=plan.tokens,
                moved=len(plan.offload) + len(plan.restore),
                seconds=result.device_seconds,
                busy=busy,
            )
        )

    def rate(self, window: float = 2.0) -> float:
        """Return tokens per second while requests ran, over the steps of the last `window` seconds; 0 without steps.

        Time without requests does not count, so a short answer has the same rate as in its completion. Nor does the
        time before the oldest recorded step: fast steps fill the record in a fraction of the window.
        """
        since = self._clock() - window
        recent = [step for step in tuple(self.steps) if step.at > since]
        busy = sum(step.busy for step in recent)
        return sum(step.sampled for step in recent) / busy if busy else 0.0

    def slowest(self) -> float:
        """Return the 99th percentile of the seconds between two tokens of a request, over the recorded steps."""
        gaps = sorted(self._gaps)
        return gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0


class _PhaseRun(NamedTuple):
    """One request in one phase in one slot, from `start` on."""

    request: str
    kind: str
    start: float


class _DrawnStep(NamedTuple):
    """One step of the picture: where it is, when it was, and its explanation."""

    number: int
    left: float  # in seconds of the picture, whose pauses are shorter
    right: float
    at: float  # seconds of its end, since the first step
    pause: float  # seconds without a step before it that have no place in the picture
    markup: str


class TimelinePicture:
    """Takes steps one by one, so the cost of a picture does not grow with the number of its steps.

    Its axis is time: a step is as wide as it took. Of a pause between steps only the beginning is drawn. Coordinates
    count from the first step: the markup of ended runs stays valid while the view box moves. Drawing 240 steps of 32
    rows anew took 1.4 ms a picture; now each step costs 7 µs once.
    """

    def __init__(self, slots: int, steps: int = 240) -> None:
        self._slots = slots
        self._row = min(ROWS[1], max(ROWS[0], TALL // max(1, slots)))
        self._records: deque[StepRecord] = deque(maxlen=steps)
        self._steps: deque[_DrawnStep] = deque(maxlen=steps)
        self._began: float | None = None
        self._now = 0.0  # where the last step ends
        self._open: dict[int, _PhaseRun] = {}  # by slot
        self._over: deque[tuple[float, str]] = deque()  # where it ends, markup

    def add(self, step: StepRecord) -> None:
        self._records.append(step)
        if self._now < _FAR:
            self._take(step)
            return
        self._now = 0.0
        for kept in (self._steps, self._open, self._over):
            kept.clear()
        for record in self._records:
            self._take(record)

    def _take(self, step: StepRecord) -> None:
        busy = max(step.busy, 1e-5)
        if self._began is None:
            self._began = step.at - busy
        at = step.at - self._began
        gap = max(0.0, at - busy - self._steps[-1].at) if self._steps else 0.0
        drawn = min(gap, PAUSE * busy)
        left = self._now + drawn
        requests = {slot: (request, kind) for slot, request, kind in step.rows}
        for slot, run in list(self._open.items()):
            if requests.get(slot) != run[:2] or drawn > busy:
                self._over.append((self._now, self._rect(slot, run)))
                del self._open[slot]
        for slot, (request, kind) in requests.items():
            if slot not in self._open:
                self._open[slot] = _PhaseRun(request, kind, left)
        self._now = left + busy
        if step.moved:
            self._over.append((self._now, _rect(left, 0, busy, 4, MOVED)))
        self._steps.append(
            _DrawnStep(step.step, left, self._now, at, gap - drawn, self._explained(step, left, busy, at))
        )
        while self._over and self._over[0][0] <= self._steps[0].left:
            self._over.popleft()

    def _rect(self, slot: int, run: _PhaseRun) -> str:
        height = self._row - (2 if self._row > 6 else 1)
        return _rect(run.start, 8 + slot * self._row, self._now - run.start, height, style.PHASES[run.kind])

    def _explained(self, step: StepRecord, left: float, busy: float, at: float) -> str:
        """Return an area over a step that says on hover what the step did."""
        kinds: dict[str, list[str]] = {}
        for _, request, kind in step.rows:
            kinds.setdefault(kind, []).append(request)
        parts = [
            f"step {step.step} at {at:.2f} s: {words.seconds(step.busy)}, {words.seconds(step.seconds)} on the device",
            f"{words.count(step.computed, 'position')} computed, {words.count(step.sampled, 'token')} sampled",
            *(f"{kind}: {_few(names)}" for kind, names in kinds.items()),
            f"{words.count(step.moved, 'page')} moved between tiers" if step.moved else "",
        ]
        title = html.escape("\n".join(filter(None, parts)))
        place = f'x="{left:.5f}" y="0" width="{busy:.5f}" height="{self._height}"'
        return f'<rect {place} fill="transparent"><title>{title}</title></rect>'

    @property
    def _height(self) -> int:
        return self._slots * self._row + 8

    def draw(self) -> html.Markup:
        """Return the picture as SVG. A mark above a step means that pages moved between tiers."""
        if not self._steps:
            return html.line(
                "Nothing has run since this was opened. Requests appear here as bars, in a line for each slot"
            )
        first = self._steps[0].left
        span = max(self._now - first, 1e-4)
        runs = [markup for _, markup in self._over] + [self._rect(slot, run) for slot, run in self._open.items()]
        runs += [step.markup for step in self._steps]
        label = f"the last {words.count(len(self._steps), 'step')}, a line for each slot"
        frame = f'viewBox="{first:.5f} 0 {span:.5f} {self._height}" preserveAspectRatio="none"'
        look = f"display:block;width:100%;max-width:{WIDTH}px;background:{style.WASH}"
        axis = svg.picture(WIDTH, 16, self._axis(first, span), label="seconds since the first step")
        numbers = f"steps {self._steps[0].number}–{self._steps[-1].number}, a line per slot; hover over one"
        return html.Markup(
            f'<svg role="img" aria-label="{label}" height="{self._height}" {frame} style="{look}">{"".join(runs)}</svg>'
            f"{axis}{html.with_hint(html.legend(style.PHASES), html.SLOTS)}{html.line(numbers, self._folded(first))}"
        )

    def _folded(self, first: float) -> str:
        """Return the time left out of the axis in words; empty if all is shown."""
        pauses = [step.pause for step in self._steps if step.pause > 0.0 and step.left > first]
        if not pauses:
            return ""
        where = "at the mark" if len(pauses) == 1 else f"at {len(pauses):,} marks"
        return f"the time axis is folded {where}, where {words.seconds(sum(pauses))} had no step"

    def _axis(self, first: float, span: float) -> Iterator[html.Markup]:
        """Yield seconds since the first step, where they fall into a step, and the pauses that have no place."""
        scale, end = WIDTH / span, -44.0
        each = next(each for each in _TICKS if span / each <= 6)
        places = max(0, -math.floor(math.log10(each)))
        for step in self._steps:
            if step.pause > 0.0 and step.left > first:
                x = (step.left - first) * scale
                yield svg.rect(x - 1, 0, 1, 5, "currentColor", title=f"{words.seconds(step.pause)} without a step")
            earliest = step.at - (step.right - step.left)
            times = [count * each for count in range(math.ceil(earliest / each), math.floor(step.at / each) + 1)]
            if step.pause > 0.0 or step is self._steps[0]:  # time goes on from here
                times.insert(0, earliest)
            for time_ in times:
                x = (step.right - step.at + time_ - first) * scale
                if x - end < 44 or x > WIDTH - 20:  # words would stand on each other
                    continue
                end = x
                yield svg.rect(x, 0, 1, 4, "currentColor", opacity=0.5)
                anchor = "middle" if x > 20 else "start"
                label = f"{time_:.6g} s" if time_ != earliest else f"{abs(time_):.{places}f} s"
                yield svg.words(x, 14, label, anchor=anchor, size=10, opacity=style.QUIET)


_TICKS = [digit * 10.0**power for power in range(-4, 9) for digit in (1, 2, 5)]
_FAR = 512.0  # seconds of a picture after which it begins anew: further on, coordinates are not exact in a browser


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _rect(x: float, y: int, width: float, height: int, colour: str) -> str:
    return f'<rect x="{x:.5f}" y="{y}" width="{width:.5f}" height="{height}" fill="{colour}"/>'


class FleetLike(Protocol):
    """A fleet; its figures are a `FleetStats`."""

    @property
    def closed(self) -> bool: ...
    def stats(self) -> Any: ...


class FleetDashboard(Live):
    """A fleet's replicas, their requests and tokens, once a second. It keeps the fleet open until it is closed."""

    interval: float = 1.0

    def __init__(self, fleet: FleetLike) -> None:
        super().__init__(button("close", "Close", title="Leave the last picture"))
        self._fleet = fleet
        self._last = ""
        self._before: tuple[float, int] | None = None  # time and number of tokens
        self.start()

    @property
    def ended(self) -> bool:
        return super().ended or self._fleet.closed

    def draw(self) -> str:
        try:
            stats = self._fleet.stats()
        except RekindleError:  # the fleet was closed: the last picture stays
            return self._last
        busy = {replica.name: replica.inside for replica in stats.replicas}
        requests = html.line("requests by replica") + html.bar(busy, rest="") if any(busy.values()) else ""
        rate = f"{self._rate(stats.generated_tokens):,.0f} tokens/s"
        self._last = str(html.block(html.line(rate), requests, stats._repr_html_()))
        return self._last

    def _rate(self, tokens: int) -> float:
        """Return the tokens per second since the previous picture."""
        now = time.monotonic()
        previous, self._before = self._before, (now, tokens)
        if previous is None or now <= previous[0]:
            return 0.0
        return max(0, tokens - previous[1]) / (now - previous[0])
