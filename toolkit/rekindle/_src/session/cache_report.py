"""The reports of `session.cache`: its tree, its figures, a prompt's hits, and the snapshots on disk."""

from __future__ import annotations

import dataclasses

from rekindle._src.core import html
from rekindle._src.kvcache.kept import KeptStatistics
from rekindle._src.kvcache.persist.snapshot import SnapshotInfo
from rekindle._src.kvcache.tiers.disk import DiskStatistics
from rekindle._src.kvcache.tiers.host import HostStatistics
from rekindle._src.kvcache.tiers.tiers import Rates

TIERS = ("device", "host", "disk")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class NodeView(html.Record):
    """A run of pages without branches, all in one tier and visited equally often."""

    depth: int  # branches above it
    text: str  # the beginning of its text, or its first token ids
    start: int  # position of its first token
    tokens: int
    pages: int
    tier: str  # the nearest tier that has it: device, host, disk, or "gone"
    visits: int
    age: float  # seconds since it was used
    pinned: bool

    def __str__(self) -> str:
        pin = ", pinned" if self.pinned else ""
        visits = html.count(self.visits, "visit")
        place = f"{html.count(self.tokens, 'token')} at {self.start}, {self.tier}, {visits}, {self.age:.0f} s ago{pin}"
        return f"{'  ' * self.depth}{self.text!r}  [{place}]"

    def _repr_html_(self) -> str:
        return str(html.line(str(self).strip()))


@dataclasses.dataclass(frozen=True, slots=True)
class CacheTree:
    """The tree from the root down, children after their parents."""

    nodes: tuple[NodeView, ...]
    total_pages: int
    shown_pages: int
    hidden_pages: int = 0  # not used by any request of this session

    @property
    def tokens(self) -> int:
        return sum(node.tokens for node in self.nodes)

    def __str__(self) -> str:
        lines = [str(node) for node in self.nodes]
        return "\n".join([*lines, *self.rest()]) or "(empty)"

    def rest(self) -> list[str]:
        """Describe the pages that are not shown, a line for each kind."""
        more = self.total_pages - self.shown_pages - self.hidden_pages
        lines = [f"and {html.count(more, 'more page')}"] if more else []
        if self.hidden_pages:
            lines.append(
                f"and {html.count(self.hidden_pages, 'page')} of other sessions: tree(restored=True) shows them"
            )
        return lines

    def __repr__(self) -> str:
        return f"<CacheTree: {self.shown_pages} of {self.total_pages} pages>"

    def _repr_html_(self) -> str:
        rows = [
            ("\u2003" * node.depth + node.text, node.tokens, node.start, node.tier, node.visits, round(node.age))
            for node in self.nodes
        ]
        table = html.table(["text", "tokens", "from", "where", "visits", "seconds ago"], rows)
        return str(html.block(table, *map(html.line, self.rest())))


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """Sizes now, and counts since the session was opened."""

    page_size: int
    page_bytes: int
    device_pages: int
    host: HostStatistics | None
    disk: DiskStatistics | None
    lookups: int  # admissions
    hits: int  # lookups that matched at least one page
    device_hit_tokens: int
    host_hit_tokens: int  # including those that were read from disk for a request
    disk_hit_tokens: int  # read from disk for a request, or put on the device ahead of one
    evicted_pages: int
    offloaded_pages: int
    refused_copies: int  # copies not made, because computing was expected to be faster
    rates: Rates | None
    # On the device, for other requests to continue: states, or pages of layers with a window, in models with such
    states: int = 0
    state_bytes: int = 0  # of each
    stateless_tokens: int = 0  # prompt tokens that were cached and computed again, because no state was behind them
    captures: KeptStatistics | None = None  # kept by requests with Capture(…, keep=True)
    windows: bool = False  # `states` are pages of layers with a window

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device_hit_tokens + self.host_hit_tokens

    @property
    def device_bytes(self) -> int:
        return self.device_pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        return self.host.bytes if self.host is not None else 0

    @property
    def disk_bytes(self) -> int:
        return self.disk.bytes if self.disk is not None else 0

    def __str__(self) -> str:
        def mib(count: int) -> str:
            return f"{count / 2**20:.1f} MiB"

        lines = [
            f"{self.hits} of {self.lookups} requests hit; {self.saved_tokens} tokens were not computed",
            f"device  {mib(self.device_bytes)}, {self.device_hit_tokens} tokens hit",
            f"host    {mib(self.host_bytes)}, {self.host_hit_tokens} tokens hit",
            f"disk    {mib(self.disk_bytes)}, {self.disk_hit_tokens} tokens read",
        ]
        if self.state_bytes:
            what, one = ("windows", "the window before them") if self.windows else ("states ", "one")
            lines.append(
                f"{what} {mib(self.states * self.state_bytes)} on the device, {self.states} of them; "
                f"{self.stateless_tokens} cached tokens were computed again without {one}"
            )
        if self.captures is not None and self.captures.bytes:
            lines.append(f"captures {mib(self.captures.bytes)}, {self.captures.reused} positions reused")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<CacheStats: {self.hits} of {self.lookups} requests hit, {self.saved_tokens} tokens saved>"

    def _repr_html_(self) -> str:
        rows = [
            (tier, getattr(self, f"{tier}_bytes") / 2**20, getattr(self, f"{tier}_hit_tokens"))
            for tier in ("device", "host", "disk")
        ]
        return str(html.block(
            html.line(f"{self.hits} of {self.lookups} requests hit", f"{self.saved_tokens:,} tokens were not computed"),
            html.table(["", "MiB", "tokens hit"], rows),
            html.line(
                f"{self.evicted_pages} pages left the device", f"{self.offloaded_pages} of them for host memory",
                f"{self.refused_copies} copies were slower than computing",
            ),
        ))  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PrefixExplanation:
    """The pages that a prompt would hit in the cache if it were admitted now."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    copies: bool  # True if pages below the device would be copied there rather than computed again
    fetch_seconds: float  # expected, for the pages below the device
    compute_seconds: float | None  # expected for the same pages; None until it is measured
    # Cached behind these, but of no use without a state or the window before their end, in models with such
    stateless_tokens: int = 0
    windows: bool = False  # it is the window

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def reused_tokens(self) -> int:
        """Tokens that would not be computed."""
        return self.cached_tokens if self.copies else self.device_tokens

    def __str__(self) -> str:
        where = ", ".join(
            f"{count} {place}"
            for count, place in (
                (self.device_tokens, "on the device"),
                (self.host_tokens, "in host memory"),
                (self.disk_tokens, "on disk"),
            )
            if count
        )
        text = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens are cached"
        text += f" ({where})" if where else ""
        if self.stateless_tokens:
            lacks = "the window before their end" if self.windows else "a state behind them"
            text += f"; {self.stateless_tokens} more are, without {lacks}, and would be computed again"
        if self.host_tokens + self.disk_tokens:
            choice = "copied" if self.copies else "computed again"
            text += (
                f"; those below the device would be {choice}: copying them takes {_time(self.fetch_seconds)}, "
                f"computing {_time(self.compute_seconds)}"
            )
        return text

    def __repr__(self) -> str:
        return f"<PrefixExplanation: {self}>"

    def _repr_html_(self) -> str:
        cached = {tier: getattr(self, f"{tier}_tokens") for tier in TIERS}
        missing = self.prompt_tokens - self.cached_tokens
        return str(html.block(html.text(str(self)), html.bar({**cached, "not cached": missing}, rest="not cached")))


def _time(seconds: float | None) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds else "a time not measured yet"


class Snapshots(list[SnapshotInfo]):
    """A list that shows itself as a table."""

    def _repr_html_(self) -> str:
        rows = [(info.name, info.pages, info.tokens, info.model, info.when, info.refused or "yes") for info in self]
        return str(html.table(["snapshot", "pages", "tokens", "model", "saved", "fits this session"], rows))
