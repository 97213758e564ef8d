"""Views of engines: `session.watch()` and `fleet.watch()`.

The dashboard shows throughput, queue, the batch over time and pages by tier, while requests run. A recorder keeps the
last steps; a timeline draws them, slots from top to bottom and steps from left to right.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from rekindle._src.core import html
from rekindle._src.core.mesh_shape import describe_share
from rekindle._src.core.records import StepResult
from rekindle._src.dispatch.engine import Observer
from rekindle._src.notebook.figures import Figure, StepRecord
from rekindle._src.notebook.figures import run as figure_of_run
from rekindle._src.notebook.live import Live, SessionLike, button
from rekindle.errors import RekindleError

WIDTH, ROW = 720, 9  # pixels
COLOURS = {"prefill": "#d9822b", "decode": "#3d8bcd"}
MOVED = "#9b59b6"


class Observable(Protocol):
    """Calls functions with every committed step."""

    def observe(self, observer: Observer) -> None: ...
    def unobserve(self, observer: Observer) -> None: ...


class Dashboard(Live):
    """Draws twice a second if something has changed. It keeps the session open until the view is closed."""

    interval: float = 0.5

    def __init__(self, session: SessionLike, steps_of: Observable, *, steps: int = 240) -> None:
        super().__init__(button("close", "Close", title="Leave the last picture"))
        self._session, self._steps = session, steps_of
        self._recorder = Recorder(steps)
        self._timeline = TimelinePicture(session.config.max_requests, steps)
        self._newest: StepRecord | None = None  # the latest step in the timeline
        self._last = ""
        self._seen: Any = None
        steps_of.observe(self._recorder)
        self.start()

    @property
    def ended(self) -> bool:
        return super().ended or self._session.closed

    def stop(self) -> None:
        super().stop()
        if not self._session.closed:
            with contextlib.suppress(RekindleError, ValueError):
                self._steps.unobserve(self._recorder)

    def recorded(self) -> Figure:
        """Return the steps that it has seen, the last 240 at most, as a figure of the run in time to scrub through."""
        return figure_of_run(tuple(self._recorder.steps))

    def draw(self) -> str:
        try:
            figures = self._session.stats().as_dict()
        except RekindleError:  # the session was closed: the last picture stays
            return self._last
        self._take()
        state = figures, self._newest, self._recorder.rate()
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
                html.count(figures.get("compilations", 0), "compilation"),
                html.count(figures["mesh"].size, "device") if "mesh" in figures else "",
                describe_share(figures),
            ),
            *([html.line("data shards", *shards)] if shards else []),
            *([html.line("drafts", *drafts)] if drafts else []),
            self._timeline.draw(),
        ]
        if figures.get("pages_total"):
            pages = {name: figures[f"pages_{name}"] for name in ("held", "cached", "free")}
            line = html.with_hint(html.line("pages on the device"), html.PAGES)
            parts.append(line + html.bar(pages, rest="free", width=WIDTH))
        parts += self._tiers()
        self._last = html.block(*parts, title=f"Session over {figures['model']}")
        return self._last

    def _load(self, figures: Mapping[str, Any]) -> list[str]:
        """Return the current load or, at rest, the work so far."""
        running, waiting = figures.get("running", 0), figures.get("waiting", 0)
        slowest = self._recorder.slowest()
        speed = f"{slowest * 1e3:.0f} ms between tokens (p99)" if slowest else ""
        if running or waiting:
            return [f"{self._recorder.rate():,.0f} tokens/s", f"{running} running", f"{waiting} waiting", speed]
        finished, generated = figures.get("finished", 0), figures.get("generated_tokens", 0)
        return ["at rest", f"{html.count(finished, 'request')} finished", html.count(generated, "token"), speed]

    def _take(self) -> None:
        """Give the timeline the steps since the last picture."""
        new_steps = list(takewhile(lambda step: step is not self._newest, reversed(tuple(self._recorder.steps))))
        for step in reversed(new_steps):
            self._timeline.add(step)
        self._newest = new_steps[0] if new_steps else self._newest

    def _tiers(self) -> list[str]:
        try:
            stats = self._session.cache.stats()
        except RekindleError:  # there is no prefix cache, or the session was closed
            return []
        sizes = {"device": stats.device_bytes, "host": stats.host_bytes, "disk": stats.disk_bytes}
        return [html.line("cached pages", *(f"{tier} {size / 2**20:.1f} MiB" for tier, size in sizes.items()))]


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
        rows += [(row.slot, row.request.id, "decode") for row in plan.decode if not row.draft]
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
    """One request in one phase in one slot, from step `first` on."""

    request: str
    kind: str
    first: int


class TimelinePicture:
    """Takes steps one by one, so the cost of a picture does not grow with the number of its steps.

    Coordinates count steps since the first one: the markup of ended runs stays valid while the view box moves.
    Drawing 240 steps of 32 rows anew took 1.4 ms a picture; now each step costs 7 µs once.
    """

    def __init__(self, slots: int, steps: int = 240) -> None:
        self._slots, self._window = slots, steps
        self._count = 0  # steps taken
        self._numbers: deque[int] = deque(maxlen=steps)  # numbers of the shown steps
        self._open: dict[int, _PhaseRun] = {}  # by slot
        self._over: deque[tuple[int, str]] = deque()  # last step, markup

    def add(self, step: StepRecord) -> None:
        requests = {slot: (request, kind) for slot, request, kind in step.rows}
        for slot, run in list(self._open.items()):
            if requests.get(slot) != run[:2]:
                self._over.append((self._count, self._rect(slot, run)))
                del self._open[slot]
        for slot, (request, kind) in requests.items():
            if slot not in self._open:
                self._open[slot] = _PhaseRun(request, kind, self._count)
        if step.moved:
            self._over.append((self._count + 1, _mark(self._count, step.moved)))
        self._count += 1
        self._numbers.append(step.step)
        while self._over and self._over[0][0] <= self._count - self._window:
            self._over.popleft()

    def _rect(self, slot: int, run: _PhaseRun) -> str:
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
