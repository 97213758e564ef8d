"""`session.cache`: the prefix cache's contents, the reason why a prompt would hit it, and ways to shape it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle._src.core import html
from rekindle._src.core.mesh_shape import address as host_and_port
from rekindle._src.core.records import IntArray
from rekindle._src.kvcache import AnyCache, Node, Tiers, TreeTails
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.session.cache_report import TIERS, CacheStats, CacheTree, NodeView, PrefixExplanation, Snapshots
from rekindle._src.session.call import Call, Once
from rekindle._src.session.client import Client
from rekindle._src.session.prompts import PromptLike
from rekindle.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.session.sharing.sharer import SharedPages

_PREVIEW = 48  # characters


class CacheView:
    """A session's prefix cache. Its methods answer at once, from any thread, unless they say that they are awaited."""

    # Any: the signature of a public class names no private type.
    def __init__(self, client: Any) -> None:
        self._client: Client = client

    # -- looking

    def tree(self, *, limit: int = 200, restored: bool = False) -> CacheTree:
        """Return the tree, at most `limit` runs of its pages.

        Pages that no request of this session used are only counted, since their text is of other notebooks and
        programs. With `restored` they are shown.
        """
        cache, tiers = self._parts()
        runs, hidden = self._client.ask(lambda: _runs(cache, tiers, limit, restored))
        return CacheTree(
            tuple(dataclasses.replace(view, text=self._preview(tokens)) for view, tokens in runs),
            len(cache),
            sum(view.pages for view, _ in runs),
            hidden,
        )

    def stats(self) -> CacheStats:
        """Return the sizes of the tiers now, and hits and copies since the session was opened."""
        cache, tiers = self._parts()

        def collect() -> CacheStats:
            counts, size = cache.statistics(), cache.page_size
            config = self._client.front.config
            state_tiers = self._client.writer.state_tiers
            state_bytes = _payload_bytes(state_tiers)
            page_bytes = (config.device_memory or 0) // (config.device_pages or 1)
            if self._windows:  # whose pages are not those of all layers
                page_bytes = _payload_bytes(tiers)
            return CacheStats(
                page_size=size,
                page_bytes=page_bytes,
                device_pages=counts.device_pages,
                host=tiers.host.statistics() if tiers is not None else None,
                disk=tiers.disk.statistics() if tiers is not None and tiers.disk is not None else None,
                lookups=counts.matches,
                hits=counts.hits,
                device_hit_tokens=counts.device_hit_pages * size,
                host_hit_tokens=counts.host_hit_pages * size,
                disk_hit_tokens=tiers.disk_hits * size if tiers is not None else 0,
                evicted_pages=counts.evicted_pages,
                offloaded_pages=counts.offloaded_pages,
                refused_copies=tiers.costs.refused if tiers is not None else 0,
                rates=tiers.costs.rates if tiers is not None else None,
                states=counts.states,
                state_bytes=state_bytes,
                stateless_tokens=counts.stateless_pages * size,
                captures=cache.kept.statistics() if cache.kept is not None else None,
                windows=self._windows,
            )

        return self._client.ask(collect)

    def explain(
        self, prompt: PromptLike, *, salt: str | None = None, adapter: str | Mapping[str, float] | None = None
    ) -> PrefixExplanation:
        """Explain which pages a request with these options would hit, where they are and what fetching them costs."""
        root = self._client.root(salt, adapter)
        cache, tiers = self._parts()
        tokens = self._client.tokens(prompt)

        def explain() -> PrefixExplanation:
            counts = dict.fromkeys(TIERS, 0)
            usable = len(tokens) // cache.page_size
            nodes: list[Node] = []
            for node in cache.find(tokens, root)[:usable]:
                if _tier(cache, tiers, node) not in counts:
                    break
                nodes.append(node)
            with_state = cache.with_state(nodes)
            for node in with_state:
                counts[_tier(cache, tiers, node)] += 1
            below = counts["host"] + counts["disk"]
            size = cache.page_size
            costs = tiers.costs if tiers is not None else None
            fetch = costs.fetch_seconds(below, from_disk=counts["disk"]) if costs is not None else 0.0
            compute = costs.compute_seconds(below) if costs is not None else None
            mode = costs.mode if costs is not None else "always"
            copies = mode == "always" or (mode == "measured" and (compute is None or fetch <= compute))
            return PrefixExplanation(
                prompt_tokens=len(tokens),
                device_tokens=counts["device"] * size,
                host_tokens=counts["host"] * size,
                disk_tokens=counts["disk"] * size,
                copies=copies,
                fetch_seconds=fetch,
                compute_seconds=compute,
                stateless_tokens=(len(nodes) - len(with_state)) * size,
                windows=self._windows,
            )

        return self._client.ask(explain)

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
        """Await it to forget every cached page, or those of a tier: "device", "host", "disk", or "memory".

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

    # -- keeping

    def export_prefix(self, prompt: PromptLike, path: str | Path) -> Call[int]:
        """Await it to write the cached pages of a prompt to a file. The result is how many tokens that covers."""
        writer, tokens, target = self._client.writer, self._client.tokens(prompt), Path(path)
        return Once(writer.run, partial(writer.export_prefix, tokens, target), name="export_prefix")

    def import_prefix(self, path: str | Path) -> Call[int]:
        """Await it to take over the pages of an exported prefix. The result is how many tokens."""
        writer, source = self._client.writer, Path(path)
        return Once(writer.run, partial(writer.import_prefix, source), name="import_prefix")

    def share(self, *, host: str = "127.0.0.1", port: int = 0, secret: str | None = None) -> Call[SharedPages]:
        """Await it to let other sessions of the same model take this one's cached pages. The result has the address.

        They have to know the secret: None reads $REKINDLE_PROCESS_SECRET or the file of $REKINDLE_PROCESS_SECRET_FILE.
        `port` 0 takes a free one. Messages between hosts are signed, and not encrypted.
        """
        return Once(self._share, host, port, secret, name="share")

    def pull(
        self, address: str, prompt: PromptLike | None = None, *, salt: str | None = None, secret: str | None = None
    ) -> Call[int]:
        """Await it to take pages from a session that shares them. The result is how many tokens they cover.

        With a `prompt`, and the `salt` of its requests, its leading pages that are not here yet. Without one, the pages
        that the other session is likeliest to need again, until half of host_memory is used.
        """
        client = self._client
        root = client.root(salt)
        tokens = None if prompt is None else client.tokens(prompt)
        return Once(self._pull, address, tokens, root, secret, name="pull")

    def __repr__(self) -> str:
        closed = self._client.host.closing
        return "<rekindle cache, closed>" if closed else f"<rekindle cache of {self._client.front.model}>"

    def _repr_html_(self) -> str:
        if self._client.host.closing:
            return str(html.line("cache of a closed session"))
        return str(html.block(self.stats()._repr_html_(), self.tree(limit=50)._repr_html_(), title="Prefix cache"))

    # -- inside

    async def _share(self, host: str, port: int, secret: str | None) -> SharedPages:
        from rekindle._src.processes.greeting import checked_secret
        from rekindle._src.session.sharing.sharer import SharedPages

        self._client.host.check()
        shared = SharedPages(self._client.host, self._client.writer, at=host, port=port, secret=checked_secret(secret))
        self._client.shared.append(shared)
        return shared

    async def _pull(self, address: str, tokens: IntArray | None, salt: str | None, secret: str | None) -> int:
        from rekindle._src.processes.greeting import checked_secret
        from rekindle._src.session.sharing.pulling import Puller
        from rekindle._src.session.sharing.source import PageAddress

        page_address = PageAddress(
            *host_and_port(address, "address", 'Pass "host:port", as share() gives it'), checked_secret(secret)
        )
        puller = Puller(self._client.host, self._client.writer)
        if tokens is None:
            return (await self._client.writer.run(partial(puller.likeliest, page_address))).tokens
        pulled = await self._client.writer.run(partial(puller.prefix, page_address, tokens, salt))
        pulled.held.release()
        return pulled.tokens

    async def _clear(self, tier: str | None) -> None:
        if tier in (None, "memory"):
            await self._client.flush_cache()
        if self._client.writer.cache is None:
            return
        cache, tiers = self._parts()
        states = self._client.writer.state_tiers
        if tier == "device":
            await self._client.between_steps(lambda: cache.evict(len(cache), read_out=False))
        elif tier == "host" and tiers is not None:
            self._client.ask(lambda: tiers.host.trim(0))
            if states is not None:
                self._client.ask(lambda: states.host.trim(0))
        if tier in (None, "disk"):
            for each in (tiers, states):
                if each is not None and each.disk is not None:
                    await self._client.writer.run(each.disk.clear)

    @property
    def _windows(self) -> bool:
        """True if layers with a window have pages of their own."""
        return isinstance(self._client.writer.states, TreeTails)

    def _parts(self) -> tuple[AnyCache, Tiers | None]:
        writer = self._client.writer
        if writer.cache is None:
            raise ConfigError("prefix_cache", False, "leaves nothing to look at", "Open the session with prefix_cache")
        return writer.cache, writer.tiers

    def _preview(self, tokens: IntArray) -> str:
        tokenizer = self._client.front.tokenizer
        if not tokenizer.has_text:
            return " ".join(map(str, tokens[:8])) + " …"
        text = tokenizer.decode(tokens.tolist())
        return text if len(text) <= _PREVIEW else text[: _PREVIEW - 1] + "…"


def _payload_bytes(tiers: Tiers | None) -> int:
    return 0 if tiers is None or tiers.identity is None else sum(leaf.nbytes for leaf in tiers.identity.leaves)


def _tier(cache: AnyCache, tiers: Tiers | None, node: Node) -> str:
    if node.page:
        return "device"
    if tiers is None:
        return "gone"
    digest = cache.digest_of(node)
    return "host" if digest in tiers else "disk" if tiers.has(digest) else "gone"


def _runs(
    cache: AnyCache, tiers: Tiers | None, limit: int, restored: bool
) -> tuple[list[tuple[NodeView, IntArray]], int]:
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
    now = cache.clock()
    runs: list[tuple[NodeView, IntArray]] = []
    todo = [(0, node) for root in reversed(cache.roots) for node in reversed(children_of.get(root, []))]
    while todo and len(runs) < limit:
        depth, first = todo.pop()
        run, tier = [first], _tier(cache, tiers, first)
        while len(children := children_of.get(run[-1], [])) == 1 and (
            (_tier(cache, tiers, children[0]), children[0].visits, bool(children[0].pins))
            == (tier, first.visits, bool(first.pins))
        ):
            run.append(children[0])
        size = cache.page_size
        view = NodeView(
            depth, "", (first.depth - 1) * size, len(run) * size, len(run), tier, first.visits,
            max(0.0, now - max(node.last_use for node in run)), bool(first.pins),
        )  # fmt: skip
        runs.append((view, np.concatenate([cache.tokens_of(node) for node in run[:4]])))
        todo += [(depth + 1, node) for node in reversed(children)]
    return runs, hidden
