"""`session.watch()`: throughput, queue, the batch over time and pages by tier, while requests run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from rekindle._src.core import html
from rekindle._src.core.mesh_report import describe_share
from rekindle._src.dispatch.host import Host
from rekindle._src.notebook.live import Live
from rekindle._src.notebook.panel import button
from rekindle._src.notebook.recorder import Recorder, StepRecord
from rekindle._src.notebook.shown import SessionLike
from rekindle._src.notebook.timeline import WIDTH, Timeline
from rekindle.errors import RekindleError


class Dashboard(Live):
    """Draws twice a second if something has changed. It keeps the session open until the view is closed."""

    interval: float = 0.5

    def __init__(self, session: SessionLike, host: Host, *, steps: int = 240) -> None:
        super().__init__(button("close", "Close", title="Leave the last picture"))
        self._session, self._host = session, host
        self._recorder = Recorder(steps)
        self._timeline = Timeline(session.config.max_requests, steps)
        self._newest: StepRecord | None = None  # the latest step in the timeline
        self._last = ""
        self._seen: Any = None
        host.observe(self._recorder)
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
                self._host.unobserve(self._recorder)

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
        parts: list[str] = [
            html.line(
                *self._load(figures),
                f"{cached_tokens / prompt_tokens:.0%} of prompt tokens cached" if prompt_tokens else "",
                html.count(figures.get("compilations", 0), "compilation"),
                html.count(figures["mesh"].size, "device") if "mesh" in figures else "",
                describe_share(figures),
            ),
            *([_shards(figures["shards"])] if "shards" in figures else []),
            self._timeline.draw(),
        ]
        if figures.get("pages_total"):
            pages = {name: figures[f"pages_{name}"] for name in ("held", "cached", "free")}
            parts.append(
                html.with_hint(html.line("pages on the device"), html.PAGES) + html.bar(pages, rest="free", width=WIDTH)
            )
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


def _shards(shards: Iterable[Any]) -> str:
    """Return a line about the data shards of a mesh."""
    lines = (
        f"{number}: {shard.running} running, {shard.waiting} waiting, {shard.pages_free} pages free"
        for number, shard in enumerate(shards)
    )
    return html.line("data shards", *lines)
