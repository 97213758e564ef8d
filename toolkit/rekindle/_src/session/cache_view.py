"""`session.cache`: the prefix cache's contents and figures, why a prompt would hit it, and ways to shape it."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from rekindle._src.calls.call import Call, Once
from rekindle._src.calls.content import MARKER, KeyedOptions, PromptOptions, without_prompt
from rekindle._src.calls.prompts import PromptLike
from rekindle._src.capabilities.captures.kept import KeptCaptures, KeptStatistics
from rekindle._src.core import words
from rekindle._src.core.drawable import Record
from rekindle._src.core.mesh_shape import address as host_and_port
from rekindle._src.core.options import refuse_keywords, refuse_missing, takes_keywords
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import IntArray
from rekindle._src.kvcache import AnyCache, Keying, Node, PrefixCache, Tiers
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.persist.snapshot import SnapshotInfo
from rekindle._src.kvcache.tiers.disk import DiskStatistics
from rekindle._src.kvcache.tiers.host import HostStatistics
from rekindle._src.kvcache.tiers.side_tiers import SideStore
from rekindle._src.kvcache.tiers.tiers import Rates
from rekindle._src.session.client import Client
from rekindle._src.views import html
from rekindle._src.views.icicle import HOW, icicle, rows, summary
from rekindle.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.kvcache.sharing import SharedPages


TIERS = ("device", "host", "disk")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class NodeView(Record):
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
    below: int = 0  # pages after it, in all branches
    left_out: int = 0  # those of them in branches that the tree has no node for, because its limit was reached
    key: int = dataclasses.field(default=0, repr=False)  # names its last page, for `text`, `pin` and `drop`
    first_key: int = dataclasses.field(default=0, repr=False)  # names its first page

    def __str__(self) -> str:
        pin = ", pinned" if self.pinned else ""
        visits = words.count(self.visits, "visit")
        place = f"{words.count(self.tokens, 'token')} at {self.start}, {self.tier}, {visits}, {self.age:.0f} s ago{pin}"
        return f"{'  ' * self.depth}{words.shorten(self.text, 48)!r}  [{place}]"

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
        lines = [f"and {words.count(more, 'more page')}"] if more else []
        if self.hidden_pages:
            lines.append(
                f"and {words.count(self.hidden_pages, 'page')} of other sessions: tree(restored=True) shows them"
            )
        return lines

    def __repr__(self) -> str:
        return f"<CacheTree: {self.shown_pages} of {self.total_pages} pages>"

    def _repr_html_(self) -> str:
        return str(html.block(icicle(self.nodes), rows(self.nodes), *map(html.line, self.rest())))


class SideStats(NamedTuple):
    """The entries of one side cache on the device, for other requests to continue."""

    name: str  # of its kind, such as "states" or "windows"
    entries: int
    bytes: int  # of each
    lacking: str  # in words, what was missing where cached tokens were computed again


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
    sides: tuple[SideStats, ...] = ()  # in models whose layers have more than pages
    stateless_tokens: int = 0  # prompt tokens that were cached, but computed again for want of entries in `sides`
    captures: KeptStatistics | None = None  # kept by requests with Capture(…, keep=True)

    @property
    def states(self) -> int:
        """Entries in `sides`."""
        return sum(side.entries for side in self.sides)

    @property
    def state_bytes(self) -> int:
        """Bytes of what a node has in `sides`."""
        return sum(side.bytes for side in self.sides)

    @property
    def windows(self) -> bool:
        """True if `states` are pages of layers with a window."""
        return any(side.name == "windows" for side in self.sides)

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
        lines += [f"{s.name:7} {mib(s.entries * s.bytes)} on the device, {s.entries} of them" for s in self.sides]
        if self.sides:
            lacking = " or ".join(side.lacking for side in self.sides)
            lines[-1] += f"; {self.stateless_tokens} cached tokens were computed again without {lacking}"
        if self.captures is not None and self.captures.bytes:
            lines.append(f"captures {mib(self.captures.bytes)}, {self.captures.reused} positions reused")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<CacheStats: {self.hits} of {self.lookups} requests hit, {self.saved_tokens} tokens saved>"

    def _repr_html_(self) -> str:
        return str(html.block(self._foremost(), self._by_tier()))

    def _foremost(self) -> html.Markup:
        """Return how many tokens each tier keeps, and how much was found; of an empty cache, what fills it."""
        host = self.host.pages if self.host is not None else 0
        disk = self.disk.pages if self.disk is not None else 0
        pages = {"on the device": self.device_pages, "in host memory": host, "on disk": disk}
        return summary({f"tokens {place}": count * self.page_size for place, count in pages.items() if count}, self)

    def _by_tier(self) -> html.Markup:
        """Return sizes and hits of each tier as a table that a click unfolds."""
        rows = [(tier, getattr(self, f"{tier}_bytes") / 2**20, getattr(self, f"{tier}_hit_tokens")) for tier in TIERS]
        moved = html.line(
            f"{words.count(self.evicted_pages, 'page')} left the device",
            f"{self.offloaded_pages:,} of them for host memory",
            f"{self.refused_copies:,} copies were not made, since computing was expected to be faster",
        )
        table = html.table(["", "MiB", "tokens hit"], rows)
        sides = [
            html.line(f"{side.name}: {side.entries:,} on the device", words.mebibytes(side.entries * side.bytes))
            for side in self.sides
        ]
        return html.details("bytes and hits by tier", table, moved, *sides, key="tiers")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PrefixExplanation:
    """The tokens of a prompt that its request would find in the cache if it were admitted now.

    They are those of `completion.usage.cached_tokens`: whole pages, and the beginning of the next one if it is copied.
    The last token of a prompt is always computed.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    reused_tokens: int  # of these, the ones that would not be computed: copying the others is expected to take longer
    fetch_seconds: float  # expected, for the pages below the device
    compute_seconds: float | None  # expected for the same pages; None until it is measured
    stateless_tokens: int = 0  # cached ones after these that are of no use, because something at their end is missing
    lacking: str = ""  # in words, what it is
    keys: tuple[int, ...] = dataclasses.field(default=(), repr=False)  # of the cached pages, as nodes of `tree()` have

    @property
    def windows(self) -> bool:
        """True if it is the window before their end."""
        return "window" in self.lacking

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def copies(self) -> bool:
        """True if all pages below the device would be copied there rather than computed again."""
        return self.reused_tokens == self.cached_tokens

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
            text += f"; {self.stateless_tokens} more are, without {self.lacking}, and would be computed again"
        if self.host_tokens + self.disk_tokens:
            again = self.cached_tokens - self.reused_tokens
            choice = f"{again} of them would be computed again" if again else "those below the device would be copied"
            text += (
                f"; {choice}: copying them takes {_time(self.fetch_seconds)}, computing {_time(self.compute_seconds)}"
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


_PREVIEW = 200  # characters


class CacheView:
    """A session's prefix cache. Its methods answer at once, from any thread, unless they say that they are awaited."""

    # Any: the signature of a public class names no private type.
    def __init__(self, client: Any) -> None:
        self._client: Client = client

    # -- looking

    def tree(self, *, limit: int = 200, restored: bool = False) -> CacheTree:
        """Return the tree, at most `limit` runs of its pages: those with most pages after them come first.

        Pages that no request of this session used are only counted, since their text is of other notebooks and
        programs. With `restored` they are shown.
        """
        cache, _ = self._parts()
        runs, hidden = self._client.ask(lambda: _runs(cache, limit, restored))
        return CacheTree(
            tuple(dataclasses.replace(view, text=words.shorten(self._text(tokens), _PREVIEW)) for view, tokens in runs),
            len(cache),
            sum(view.pages for view, _ in runs),
            hidden,
        )

    def text(self, node: NodeView, *, limit: int = 4096) -> str:
        """Return the text of a node of `tree()`, of its last `limit` tokens at most."""

        def tokens() -> IntArray:
            tree, found = self._place(node)
            return tree.path(found)[node.start :][-max(1, limit) :]

        return self._text(self._client.ask(tokens))

    def stats(self) -> CacheStats:
        """Return the sizes of the tiers now, and hits and copies since the session was opened."""
        cache, tiers = self._parts()
        disk = (
            tiers.disk.statistics() if tiers is not None and tiers.disk is not None else None
        )  # may wait for the disk

        def collect() -> CacheStats:
            counts, size = cache.statistics(), cache.page_size
            config = self._client.front.config
            plans = [side.cache.plan for side in self._sides]
            page_bytes = (config.device_memory or 0) // (config.device_pages or 1)
            if any(plan.keying is Keying.PAGES for plan in plans):  # these share device_memory
                page_bytes = _payload_bytes(tiers)
            lengths = [len(side.cache) for side in self._sides]
            return CacheStats(
                page_size=size,
                page_bytes=page_bytes,
                device_pages=counts.device_pages,
                host=tiers.host.statistics() if tiers is not None else None,
                disk=disk,
                lookups=counts.matches,
                hits=counts.hits,
                device_hit_tokens=counts.device_hit_pages * size,
                host_hit_tokens=counts.host_hit_pages * size,
                disk_hit_tokens=tiers.disk_hits * size if tiers is not None else 0,
                evicted_pages=counts.evicted_pages,
                offloaded_pages=counts.offloaded_pages,
                refused_copies=tiers.costs.refused if tiers is not None else 0,
                rates=tiers.costs.rates if tiers is not None else None,
                sides=tuple(
                    SideStats(plan.name, length, plan.entry_bytes, plan.words.lacking)
                    for plan, length in zip(plans, lengths, strict=True)
                ),
                stateless_tokens=counts.stateless_pages * size,
                captures=None if (kept := KeptCaptures.of(cache)) is None else kept.statistics(),
            )

        return self._client.ask(collect)

    @takes_keywords(KeyedOptions)
    def explain(
        self,
        prompt: PromptLike,
        **options: Unpack[KeyedOptions],
    ) -> PrefixExplanation:
        """Explain which tokens a request with these options would hit, where they are and what fetching them costs."""
        refuse_keywords(options, CacheView.explain)
        self._parts()
        request = self._client.keyed_request(prompt, **options)
        hit = self._client.ask(lambda: self._client.engine.scheduler.forecast(request))
        return PrefixExplanation(
            prompt_tokens=request.prompt_length,
            device_tokens=hit.device_tokens,
            host_tokens=hit.host_tokens,
            disk_tokens=hit.disk_tokens,
            reused_tokens=hit.reused_tokens,
            fetch_seconds=hit.fetch_seconds,
            compute_seconds=hit.compute_seconds,
            stateless_tokens=hit.stateless_tokens,
            lacking=" or ".join(side.cache.plan.words.lacking for side in self._sides),
            keys=hit.keys,
        )

    def snapshots(self) -> Snapshots:
        """Return the snapshots in the session's cache folder, each with the reason if this session can't use it."""
        _, tiers = self._parts()
        if tiers is None or tiers.disk is None:
            return Snapshots()
        return Snapshots(snapshot.describe_all(tiers.disk.folder, tiers.disk.identity))

    # -- shaping

    def prune(self, *, to: int) -> int:
        """Shrink the pages in host memory to `to` bytes, least recently used first. Return how many were dropped."""
        if isinstance(to, bool) or not isinstance(to, int) or to < 0:
            raise InvalidRequest("to", to, "is not a number of bytes", "Pass an int from 0, such as 100_000_000")
        _, tiers = self._parts()
        return self._client.ask(lambda: tiers.host.trim(to)) if tiers is not None else 0

    def clear(self, *, tier: str | None = None) -> Call[None]:
        """Await it to forget all cached pages, or one tier's: "device", "host", "disk", or "memory".

        "memory" is device and host together; pages on disk stay. Requests that run keep their pages. Pinned pages
        stay if the tier is "device", and are forgotten with "memory" and with everything.
        """
        if tier is not None and tier not in (*TIERS, "memory"):
            known = ", ".join(map(repr, (*TIERS, "memory")))
            raise ConfigError("tier", tier, "is not a tier", f"Use one of {known}, or None")
        return Once(self._clear, tier, name="clear")

    def delete(self, name: str) -> bool:
        """Remove the snapshots of a name; their pages stay on disk until the room is needed."""
        _, tiers = self._parts()
        return tiers is not None and tiers.disk is not None and snapshot.delete(tiers.disk.folder, name)

    def pin(self, node: NodeView) -> int:
        """Keep a node of `tree()` on the device, with all before it, until `unpin`. Return how many tokens that covers.

        Raises `OutOfPages` if an accepted request could not finish then.
        """
        return self._client.ask(lambda: self._client.engine.scheduler.pin(self._prefix_to(node)))

    def unpin(self, node: NodeView) -> int:
        """Undo one `pin` of a node. Return how many tokens are no longer kept."""
        return self._client.ask(lambda: self._client.engine.scheduler.unpin(self._prefix_to(node)))

    def drop(self, node: NodeView) -> int:
        """Forget a node of `tree()` and all after it. Return how many pages left the device.

        Pages in use and pinned ones stay, and so does what was written to disk.
        """
        _, tiers = self._parts()

        def drop() -> int:
            tree, last = self._place(node)
            first = last
            for _ in range(node.pages - 1):
                assert first.parent is not None, "a node begins after a root"
                first = first.parent
            return tree.drop(first, None if tiers is None else tiers.host.discard)

        return self._client.ask(drop)

    # -- keeping

    @takes_keywords(PromptOptions)
    def export_prefix(self, prompt: PromptLike, path: str | Path, **content: Unpack[PromptOptions]) -> Call[int]:
        """Await it to write the cached pages of a prompt to a file. The result is how many tokens that covers."""
        refuse_keywords(content, CacheView.export_prefix)
        refuse_missing(CacheView.export_prefix, prompt=prompt, path=path)
        writer, prefix, target = self._client.writer, self._client.prefix(prompt, **content), Path(path)
        return Once(self._client.in_writer, partial(writer.export_prefix, prefix, target), name="export_prefix")

    def import_prefix(self, path: str | Path) -> Call[int]:
        """Await it to take over the pages of an exported prefix. The result is how many tokens."""
        writer, source = self._client.writer, Path(path)
        return Once(self._client.in_writer, partial(writer.import_prefix, source), name="import_prefix")

    def share(self, *, host: str = "127.0.0.1", port: int = 0, secret: str | None = None) -> Call[SharedPages]:
        """Await it to let other sessions of the same model take this one's cached pages. The result has the address.

        They have to know the secret: None reads $REKINDLE_PROCESS_SECRET or the file of $REKINDLE_PROCESS_SECRET_FILE.
        `port` 0 takes a free one. Messages between hosts are signed, and not encrypted.
        """
        return Once(self._share, host, port, secret, name="share")

    @takes_keywords(PromptOptions)
    def pull(
        self,
        address: str,
        prompt: PromptLike | None = None,
        *,
        salt: str | None = None,
        secret: str | None = None,
        **content: Unpack[PromptOptions],
    ) -> Call[int]:
        """Await it to take pages from a session that shares them. The result is how many tokens they cover.

        With a `prompt`, and the `images` and `salt` of its requests, its leading pages that are not here yet. Without
        one, the pages that the other session is likeliest to need again, until half of host_memory is used.
        """
        client = self._client
        refuse_keywords(content, CacheView.pull)
        refuse_missing(CacheView.pull, address=address)
        if prompt is None and any(value is not None for value in content.values()):
            raise without_prompt(content)
        prefix = None if prompt is None else client.prefix(prompt, salt=salt, **content)
        return Once(self._pull, address, prefix, secret, name="pull")

    def __repr__(self) -> str:
        closed = self._client.host.closing
        return "<rekindle cache, closed>" if closed else f"<rekindle cache of {self._client.front.model}>"

    def _repr_html_(self) -> str:
        if self._client.host.closing:
            return str(html.line("cache of a closed session"))
        stats, tree = self.stats(), self.tree(limit=50)
        parts = (stats._foremost(), html.line(HOW) if tree.nodes else "", tree._repr_html_(), stats._by_tier())
        return str(html.block(*parts, title="Prefix cache"))

    # -- inside

    async def _share(self, host: str, port: int, secret: str | None) -> SharedPages:
        from rekindle._src.channels.greeting import checked_secret
        from rekindle._src.kvcache.sharing import SharedPages

        self._client.host.check()
        shared = SharedPages(self._client.host, self._client.writer, at=host, port=port, secret=checked_secret(secret))
        self._client.shared.append(shared)
        return shared

    async def _pull(self, address: str, prefix: Prefix | None, secret: str | None) -> int:
        from rekindle._src.channels.greeting import checked_secret
        from rekindle._src.kvcache.sharing import PageAddress, Puller

        page_address = PageAddress(
            *host_and_port(address, "address", 'Pass "host:port", as share() gives it'), checked_secret(secret)
        )
        puller = Puller(self._client.host, self._client.writer)
        if prefix is None:
            return (await self._client.in_writer(partial(puller.likeliest, page_address))).tokens
        pulled = await self._client.in_writer(partial(puller.prefix, page_address, prefix))
        pulled.held.release()
        return pulled.tokens

    async def _clear(self, tier: str | None) -> None:
        if tier in (None, "memory"):
            await self._client.flush_cache()
        if self._client.writer.cache is None:
            return
        cache, tiers = self._parts()
        all_tiers = [tiers, *(side.tiers for side in self._sides)]
        if tier == "device":
            await self._client.between_steps(lambda: cache.evict(len(cache), read_out=False))
        elif tier == "host" and tiers is not None:
            for each in all_tiers:
                if each is not None:
                    self._client.ask(partial(each.host.trim, 0))
        if tier in (None, "disk"):
            for each in all_tiers:
                if each is not None and each.disk is not None:
                    await self._client.in_writer(each.disk.clear)

    @property
    def _sides(self) -> tuple[SideStore, ...]:
        """The side caches of the model."""
        return self._client.writer.sides

    def _parts(self) -> tuple[AnyCache, Tiers | None]:
        writer = self._client.writer
        if writer.cache is None:
            raise ConfigError("prefix_cache", False, "leaves nothing to look at", "Open the session with prefix_cache")
        return writer.cache, writer.tiers

    def _text(self, tokens: IntArray) -> str:
        tokenizer = self._client.front.tokenizer
        if not tokenizer.has_text:
            return " ".join(map(str, tokens[:8])) + " …"
        runs = itertools.groupby(tokens.tolist(), lambda token: token < 0)  # those below 0 are of pages with a picture
        return "".join(MARKER if other else tokenizer.decode(list(run)) for other, run in runs)

    def _place(self, node: NodeView) -> tuple[PrefixCache, Node]:
        """Return a node of the tree with the cache that has it. Called on the host's loop."""
        cache, _ = self._parts()
        for tree in cache.trees:
            found = tree.known(node.key)
            if found is not None:
                return tree, found
        fix = "Look at session.cache.tree() again"
        raise InvalidRequest("node", node.text, "is no longer in the cache", fix)

    def _prefix_to(self, node: NodeView) -> Prefix:
        """Return the prefix of the pages up to a node. Refuse other namespaces, since pages do not tell them."""
        tree, place = self._place(node)
        prefix = Prefix(tree.path(place))
        if tree.find(prefix)[-1:] != [place]:
            fix = "Use session.pin(prompt, salt=…, adapter=…)"
            raise InvalidRequest("node", node.text, "belongs to requests with a salt or an adapter", fix)
        return prefix


def _payload_bytes(tiers: Tiers | None) -> int:
    return 0 if tiers is None or tiers.identity is None else sum(leaf.nbytes for leaf in tiers.identity.leaves)


def _runs(cache: AnyCache, limit: int, restored: bool) -> tuple[list[tuple[NodeView, IntArray]], int]:
    """Return at most `limit` runs of pages with their first tokens, depth first, and how many pages are left out.

    Pages that no request of this session used are left out unless `restored` is True.
    """
    children_of: dict[Node, list[Node]] = {}
    hidden = 0
    for node in cache:
        assert node.parent is not None
        if not (restored or node.requested):
            hidden += 1
            continue
        children_of.setdefault(node.parent, []).append(node)
    runs, size, now = _largest(cache, children_of, limit), cache.page_size, cache.clock()
    views: list[tuple[NodeView, IntArray]] = []
    todo = [(0, node) for root in reversed(cache.roots) for node in reversed(children_of.get(root, []))]
    while todo:
        depth, first = todo.pop()
        if first not in runs:
            continue
        run, below = runs[first]
        after = children_of.get(run[-1], [])
        shown = sum(len(part.run) + part.below for part in (runs[child] for child in after if child in runs))
        view = NodeView(
            depth, "", (first.depth - 1) * size, len(run) * size, len(run), cache.tier_of(first), first.visits,
            max(0.0, now - max(node.last_use for node in run)), bool(first.pins), below, below - shown, run[-1].key,
            first.key,
        )  # fmt: skip
        views.append((view, np.concatenate([cache.tokens_of(node) for node in run[:4]])))
        todo += [(depth + 1, node) for node in reversed(after)]
    return views, hidden


class _ShownRun(NamedTuple):
    run: list[Node]
    below: int  # pages after it


def _largest(cache: AnyCache, children_of: dict[Node, list[Node]], limit: int) -> dict[Node, _ShownRun]:
    """Return at most `limit` runs by their first nodes: the largest with all below, parents before children."""
    sizes: dict[Node, int] = {}  # of a node and all below
    for node in reversed([node for nodes in children_of.values() for node in nodes]):
        sizes[node] = 1 + sum(sizes[child] for child in children_of.get(node, ()))
    heap: list[tuple[float, int, Node]] = []
    counter = itertools.count()  # nodes have no order of their own

    def offer(after: Node) -> None:
        branches = sorted(children_of.get(after, ()), key=lambda node: -sizes[node])
        for rank, node in enumerate(branches, 1):  # a branch with many alike leaves room for other branches
            heapq.heappush(heap, (-sizes[node] / rank, next(counter), node))

    for root in cache.roots:
        offer(root)
    runs: dict[Node, _ShownRun] = {}
    while heap and len(runs) < limit:
        _, _, first = heapq.heappop(heap)
        run, kind = [first], (cache.tier_of(first), first.visits, bool(first.pins))
        while len(children := children_of.get(run[-1], [])) == 1:
            child = children[0]
            if (cache.tier_of(child), child.visits, bool(child.pins)) != kind:
                break
            run.append(child)
        runs[first] = _ShownRun(run, sizes[first] - len(run))
        offer(run[-1])
    return runs
