"""`fleet.watch()`: a live view of a fleet's replicas, their requests and tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rekindle._src.core import html
from rekindle._src.notebook.live import Live, button
from rekindle._src.replicas.fleet_stats import FleetStats
from rekindle.errors import RekindleError

if TYPE_CHECKING:
    from rekindle._src.replicas.fleet import Fleet


class FleetDashboard(Live):
    """Draws once a second if something has changed. It keeps the fleet open until the view is closed."""

    interval: float = 1.0

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(button("close", "Close", title="Leave the last picture"))
        self._fleet = fleet
        self._last = ""
        self._before: tuple[float, int] | None = None  # time and number of tokens
        self.start()

    @property
    def ended(self) -> bool:
        return super().ended or self._fleet.closed

    def press(self, name: str) -> None:
        if name == "close":
            self.stop()

    def draw(self) -> str:
        try:
            stats = self._fleet.stats()
        except RekindleError:  # the fleet was closed: the last picture stays
            return self._last
        busy = {replica.name: replica.inside for replica in stats.replicas}
        requests = html.line("requests by replica") + html.bar(busy, rest="") if any(busy.values()) else ""
        self._last = str(html.block(html.line(f"{self._rate(stats):,.0f} tokens/s"), requests, stats._repr_html_()))
        return self._last

    def _rate(self, stats: FleetStats) -> float:
        """Return the tokens per second since the previous picture."""
        now, tokens = time.monotonic(), stats.generated_tokens
        previous, self._before = self._before, (now, tokens)
        if previous is None or now <= previous[0]:
            return 0.0
        return max(0, tokens - previous[1]) / (now - previous[0])
