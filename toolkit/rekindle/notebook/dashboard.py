"""`session.watch()`: throughput, queue, the batch over time and pages by tier, while requests run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from rekindle import html
from rekindle.errors import RekindleError
from rekindle.notebook.live import Live
from rekindle.notebook.panel import button
from rekindle.notebook.recorder import Recorder, Seen
from rekindle.tasks.host import wait

if TYPE_CHECKING:
    from rekindle.session import Session

WIDTH, ROW = 720, 9  # pixels
COLOURS = {"prefill": "#d9822b", "decode": "#3d8bcd"}


class Dashboard(Live):
    """Looks four times a second; what has not changed is not sent. Keeps the session open until it is closed."""

    interval = 0.25

    def __init__(self, session: Session, *, steps: int = 240) -> None:
        super().__init__(button("close", "Close", title="Leave the last picture"))
        self._session = session
        self._recorder = Recorder(steps)
        self._slots = session.config.max_requests
        self._last = ""
        self._seen: Any = None
        wait(session._host.call(lambda dispatch: dispatch.observers.append(self._recorder)))
        self.start()

    @property
    def ended(self) -> bool:
        return super().ended or self._session.closed

    def press(self, name: str) -> None:
        if name == "close":
            self.stop()

    def stop(self) -> None:
        super().stop()
        if not self._session.closed:
            with contextlib.suppress(RekindleError, ValueError):
                wait(self._session._host.call(lambda dispatch: dispatch.observers.remove(self._recorder)))

    def draw(self) -> str:
        try:
            figures = self._session.stats().as_dict()
        except RekindleError:  # it was closed: the last picture stays
            return self._last
        steps = tuple(self._recorder.steps)
        seen = (figures, len(steps) and steps[-1].step, self._recorder.rate())
        if seen == self._seen:  # an idle session costs four calls a second on its loop, and no drawing
            return self._last
        self._seen = seen
        cached, asked = figures.get("cached_tokens", 0), figures.get("prompt_tokens", 0)
        parts: list[str] = [
            html.line(
                f"{self._recorder.rate():,.0f} tokens/s",
                f"{figures.get('running', 0)} running",
                f"{figures.get('waiting', 0)} waiting",
                f"{self._recorder.slowest() * 1e3:.0f} ms between tokens (p99)",
                f"{cached / asked:.0%} of prompt tokens cached" if asked else "",
                f"{figures.get('compilations', 0)} compilations",
            ),
            timeline(steps, self._slots),
        ]
        if figures.get("pages_total"):
            parts.append(html.bar({name: figures[f"pages_{name}"] for name in ("held", "cached", "free")}, width=WIDTH))
        parts += self._tiers()
        self._last = html.block(*parts, title=f"Session over {figures['model']}")
        return self._last

    def _tiers(self) -> list[str]:
        cache: Any = getattr(self._session, "cache", None)
        try:
            stats = cache.stats()
        except (RekindleError, AttributeError):
            return []
        mib = {tier: getattr(stats, f"{tier}_bytes") / 2**20 for tier in ("device", "host", "disk")}
        return [html.line("cached pages", *(f"{tier} {size:.1f} MiB" for tier, size in mib.items()))]


def timeline(steps: tuple[Seen, ...], slots: int) -> html.Markup:
    """Slots from top to bottom, steps from left to right; a mark above a step that moved pages between tiers."""
    if not steps:
        return html.line("no step has run yet")
    width, height = WIDTH / max(60, len(steps)), slots * ROW + 8
    marks = [
        f'<rect x="{index * width:.1f}" y="0" width="{width:.1f}" height="4" fill="#9b59b6"><title>{seen.moved} pages '
        "moved</title></rect>"
        for index, seen in enumerate(steps)
        if seen.moved
    ]
    runs: list[str] = []
    open_runs: dict[int, tuple[str, str, int]] = {}  # slot → request, kind, first step

    def close(slot: int, end: int) -> None:
        request, kind, first = open_runs.pop(slot)
        runs.append(
            f'<rect x="{first * width:.1f}" y="{8 + slot * ROW}" width="{(end - first) * width:.1f}" '
            f'height="{ROW - 2}" fill="{COLOURS[kind]}">'
            f"<title>{html.escape(request)} {kind}, {end - first} steps</title></rect>"
        )

    for index, seen in enumerate(steps):
        now = {slot: (request, kind) for slot, request, kind in seen.rows}
        for slot in [slot for slot, (request, kind, _) in open_runs.items() if now.get(slot) != (request, kind)]:
            close(slot, index)
        for slot, (request, kind) in now.items():
            open_runs.setdefault(slot, (request, kind, index))
    for slot in list(open_runs):
        close(slot, len(steps))
    legend = " ".join(f'<span style="color:{colour}">■</span> {kind}' for kind, colour in COLOURS.items())
    return html.Markup(
        f'<svg width="{WIDTH}" height="{height}" style="background:rgba(128,128,128,.12)">{"".join(marks + runs)}</svg>'
        f'<div style="font-size:85%">{legend} · steps {steps[0].step}–{steps[-1].step}, one line per slot</div>'
    )
