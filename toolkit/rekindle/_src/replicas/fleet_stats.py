"""A snapshot of a fleet: the figures of its replicas, their sums, and how evenly requests are spread."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rekindle._src.core import words
from rekindle._src.core.drawable import Record
from rekindle._src.core.figures import EngineFigures
from rekindle._src.replicas.link import Link
from rekindle._src.replicas.routes import Routes
from rekindle._src.views import html


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ReplicaStats(Record):
    """One replica of a fleet."""

    name: str
    role: str  # both, prefill or decode
    state: str  # opening, ready, draining, failed or closed
    host: str  # where it runs; empty while it is opening
    pid: int
    inside: int  # sequences that were sent to it and have not ended
    routed: int  # all sequences that were sent to it
    replaced: int  # times that a new process took over
    reopened_after: tuple[float, ...]  # seconds from each loss of a process until the next one was ready
    why: str  # reason why the latest process was lost, or could not be opened
    figures: Mapping[str, Any]  # of its session, at most a few seconds old; counts continue after a replacement
    weights: str = ""  # from `swap_weights`; empty: the weights that it was opened with

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that came from its prefix cache."""
        return _share(self.figures.get("cached_tokens", 0), self.figures.get("prompt_tokens", 0))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class FleetStats(EngineFigures, Record):
    """A snapshot of a fleet. Figures of the replicas come with their mail and are at most a few seconds old."""

    model: str
    router: str
    replicas: tuple[ReplicaStats, ...]
    live: int  # requests from submit to their end
    places: int  # requests that may be live at once
    waiting_for_a_place: int
    waiting: int  # sequences without a replica, and those in the replicas' queues
    moved: int  # sequences that went on in another replica
    lost: int  # processes of replicas that were lost
    handed_over: int = 0  # sequences with a prompt that one replica has computed for another
    follows: tuple[int, int] | None = None  # range of the number of replicas, which follows the load; None: it is fixed

    @property
    def ready(self) -> int:
        """Replicas that take requests."""
        return sum(replica.state == "ready" for replica in self.replicas)

    @property
    def imbalance(self) -> float:
        """Sequences sent to the replica that got most, in proportion to the mean; 1 is even."""
        routed = [replica.routed for replica in self.replicas]
        return max(routed) * len(routed) / sum(routed) if sum(routed) else 1.0

    def total(self, name: str) -> int:
        """Return a figure of `session.stats()`, summed over the replicas."""
        return sum(replica.figures.get(name, 0) for replica in self.replicas)

    _figure = total

    @property
    def step_sizes(self) -> dict[int, int]:
        """Steps by how many tokens they computed, rounded up to a power of two."""
        sizes: Counter[int] = Counter()
        for replica in self.replicas:
            sizes.update(replica.figures.get("step_sizes", {}))
        return dict(sizes)

    @property
    def slow_steps(self) -> int:
        """Steps that took longer than step_timeout."""
        return self.total("slow_steps")

    @property
    def pulled_pages(self) -> int:
        """Pages that replicas took from each other."""
        return self.total("pulled_pages")

    @property
    def pulled_bytes(self) -> int:
        """Bytes of those pages."""
        return self.total("pulled_bytes")

    @property
    def failed_pulls(self) -> int:
        """Times that a replica could not take the pages of a prompt, and computed it instead."""
        return self.total("failed_pulls")

    def as_dict(self) -> dict[str, Any]:
        """Return its fields and the sums by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, **{name: getattr(self, name) for name in _SUMS}}

    def __repr__(self) -> str:
        return (
            f"<FleetStats {self.model}: {self.ready} of {words.count(len(self.replicas), 'replica')} ready, "
            f"{self.running} running, {self.waiting} waiting>"
        )

    def _repr_html_(self) -> str:
        lost = f"{words.count(self.lost, 'process')} lost, {words.count(self.moved, 'request')} moved"
        head = html.line(
            f"{self.ready} of {words.count(len(self.replicas), 'replica')} ready",
            f"router {self.router}",
            f"{self.follows[0]} to {self.follows[1]} as the load asks for" if self.follows else "",
            f"{self.running} running",
            f"{self.waiting} waiting",
            f"{self.hit_rate:.0%} of prompt tokens cached" if self.prompt_tokens else "",
            f"imbalance {self.imbalance:.2f}",
            f"{words.count(self.pulled_pages, 'page')} taken from each other" if self.pulled_pages else "",
            lost if self.lost else "",
        )
        rows = [
            (
                replica.name,
                replica.state if replica.role == "both" else f"{replica.state}, {replica.role}",
                replica.host,
                replica.inside,
                replica.figures.get("running", 0),
                replica.figures.get("generated_tokens", 0),
                f"{replica.hit_rate:.0%}",
                replica.replaced,
                words.shorten(replica.why, 60),
            )
            for replica in self.replicas
        ]
        names = ["replica", "state", "host", "requests", "running", "tokens", "cached", "replaced", "lost because it"]
        return str(html.block(head, html.table(names, rows), title=f"Fleet over {self.model}"))


_SUMS = tuple(
    name for kind in (EngineFigures, FleetStats) for name, entry in vars(kind).items() if isinstance(entry, property)
)


def replica_stats(link: Link, routes: Routes) -> ReplicaStats:
    """Return the current figures of one replica. Call it on the fleet's loop."""
    info = link.info
    return ReplicaStats(
        name=link.name,
        role=link.role,
        state=str(link.state),
        host="" if info is None else info.host,
        pid=0 if info is None else info.pid,
        inside=routes.inside(link.name),
        routed=routes.counts.routed.get(link.name, 0),
        replaced=link.replaced,
        reopened_after=tuple(link.reopened_after),
        why=link.why,
        figures=link.figures(),
        weights=link.weights.name,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
