"""The prefix tree: matches prompts with cached pages, takes over computed pages, and chooses which leave the device.

    match ─► lock (+ restore)      an admission takes the matched pages
    publish                        a committed step filled pages; duplicates are merged into the page that is there
    unreference                    a sequence has released its pages
    evict                          pages are short: leaves go, to the host tier if there is one
    offload_done, restore_done     the step that moved pages was committed or has failed (then `detach`, too)
    to_fetch                       pages that have to be read from disk before a match can use them

For snapshots: iterating gives the nodes, parents first, with `key, parent, page, visits, last_use`; `tokens_of`
and `digest_of` describe one; `graft` adds a prefix with payloads in a lower tier.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.drawable import Record
from rekindle._src.core.prefix import PageNamespace, Prefix
from rekindle._src.core.records import IntArray, PageMove
from rekindle._src.kvcache.digest import page_digest, page_keys
from rekindle._src.kvcache.eviction import EvictionQueue
from rekindle._src.kvcache.node import Beginnings, Node, NodeTable, OffloadedNodes, TierLike, common, is_below
from rekindle._src.kvcache.node import least_copied as least_of
from rekindle._src.kvcache.page_data import PageData
from rekindle._src.kvcache.pool import PagePool
from rekindle._src.kvcache.side import SideCache, SideCaches

MAX_ASIDE = 4  # roots that keep their nodes while other weights are in use


class PrefixMatch(NamedTuple):
    """The longest cached prefix: `nodes[:on_device]` are on the device, the rest can be restored from the host tier.

    With side caches, the last node has what a prompt needs of them. Beyond it, up to `reached`, pages alone are cached.
    """

    nodes: Sequence[Node]
    on_device: int
    reached: int = 0  # pages

    @property
    def pages(self) -> list[int]:
        return [node.page for node in self.nodes[: self.on_device]]


class Publication(NamedTuple):
    """The node and the pages that a sequence uses after the tree took over those it had."""

    node: Node  # the deepest one
    pages: list[int]  # its pages from now on
    duplicates: list[int]  # its former pages, to be released when no step in flight reads them any more


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class CacheStatistics(Record):
    """Sizes now, and counts since the cache was made."""

    nodes: int
    device_pages: int  # in the tree, held or not
    evictable_pages: int
    pinned_pages: int
    forgotten_nodes: int
    states: int  # entries of side caches on the device
    matches: int  # admissions that looked up a prefix
    hits: int  # matches that found one
    device_hit_pages: int
    host_hit_pages: int
    published_pages: int
    merged_pages: int  # computed twice, kept once
    evicted_pages: int
    offloaded_pages: int
    states_taken: int  # left by requests
    states_restored: int  # brought back from host memory
    states_evicted: int
    stateless_pages: int  # cached, and computed again because no entry of a side cache was there


class PrefixCache:
    """Radix tree over pages of token ids, on top of a page pool that it shares with sequences."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        root_key: bytes,
        *,
        host_tier: TierLike | None = None,
        sides: Sequence[SideCache] = (),
        data: Sequence[PageData] = (),
        least_copied: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`least_copied` tokens at the beginning of a page are worth a copy of it; 0: none are, None: the page size
        decides. With side caches none are: their entries are there at the end of whole pages alone."""
        self.pool, self.page_size, self.root_key = pool, page_size, root_key
        self.host_tier, self.clock = host_tier, clock
        self.data = tuple(data)  # of capabilities, by the digests of pages
        self.sides = SideCaches(sides)
        for side in sides:
            side.digest_of = self.digest_of
        self.version = 0  # changes whenever a match may turn out differently
        self.generation = 0  # counts resets: a sequence of an older generation neither publishes nor releases
        self.pinned_pages = 0
        self.least_copied = least_of(page_size) if least_copied is None else least_copied
        if sides:
            self.least_copied = 0
        self._forgotten = 0
        self._counts = {field.name: 0 for field in dataclasses.fields(CacheStatistics)[6:]}
        self._leaves = EvictionQueue(pool)
        self._altered: dict[str, set[bytes]] = {}  # roots by what changes their pages
        self._aside: dict[bytes, tuple[NodeTable, OffloadedNodes]] = {}  # by the roots of other weights
        self._table, self._offloaded = self._empty()
        self._beginnings = Beginnings(self.least_copied)

    @property
    def trees(self) -> tuple[PrefixCache, ...]:
        """The trees of this cache: itself. `caches.PrefixCaches` has several."""
        return (self,)

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._table)

    @property
    def root(self) -> Node:
        return self._table.root

    @property
    def roots(self) -> list[Node]:
        """The root, and the roots of namespaces in use."""
        return self._table.roots()

    def root_of(self, namespace: PageNamespace) -> Node:
        """Return the root of the first pages of requests in a namespace."""
        digest = namespace.root(self.root_key)
        for altered in namespace.altered:
            self._altered.setdefault(altered, set()).add(digest)
        return self._table.namespace(digest)

    def root_with(self, digest: bytes) -> Node:
        """Return the root of the namespace with this digest."""
        return self._table.namespace(digest)

    def keys(self, prefix: Prefix) -> list[int]:
        """Return the lookup keys of a prompt's full pages."""
        return page_keys(prefix.tokens, self.page_size, previous=prefix.namespace.key)

    def tokens_of(self, node: Node) -> IntArray:
        """Return the tokens of this page alone."""
        return self._table.tokens_of(node)

    def digest_of(self, node: Node) -> bytes:
        """Return the page's name in every process; computed once."""
        return self._table.digest_of(node)

    def names_to(self, node: Node) -> list[bytes]:
        """Return the digests of all pages from the root's first up to this one."""
        names = []
        while node.parent is not None:
            names.append(self.digest_of(node))
            node = node.parent
        return names[::-1]

    def has(self, node: Node) -> bool:
        """True if `node` is still part of the tree."""
        return node in self._table

    def find(self, prefix: Prefix) -> list[Node]:
        """Return the known nodes of a prompt, in any tier. Statistics and scores do not change."""
        return self._known(self.keys(prefix), prefix)

    def by_digest(self, key: int, digest: bytes) -> Node | None:
        """Return the known node with this digest, its name in every process; `key` is its lookup key here."""
        node = self._table.get(key)
        return node if node and self.digest_of(node) == digest else None

    def in_host_memory(self, node: Node) -> bool:
        """True if the payload of `node` is in host memory."""
        return self._offloaded.restorable(node)

    def tier_of(self, node: Node) -> str:
        """Return the nearest tier that has a page: device, host, disk, or "gone"."""
        if node.page:
            return "device"
        if self._offloaded.restorable(node):
            return "host"
        return "disk" if self._offloaded.on_disk(node) else "gone"

    # -- lookup

    def _known(self, keys: Sequence[int], prefix: Prefix) -> list[Node]:
        return self._table.find(self.root_of(prefix.namespace), keys, prefix.tokens)

    def probe(self, keys: Sequence[int], *, on_device: bool = True) -> int:
        """Return about how many leading pages are on the device, or known at all. Quick: compares keys, not tokens.

        Of pages on the device those count that a request can use, which also needs the entries of side caches there.
        """
        depth, get = self._table.depth(keys, on_device=on_device), self._table.get
        if not (self.sides and on_device):
            return depth
        return self.sides.deepest_of(
            depth, lambda side, index: (node := get(keys[index])) is not None and side.on_device(node)
        )

    def depth(self, keys: Sequence[int]) -> int:
        """Return how many leading pages are on the device, whatever side caches have there; approximate."""
        return self._table.depth(keys, on_device=True)

    def match(self, keys: Sequence[int], prefix: Prefix) -> PrefixMatch:
        """Return the longest prefix with pages on the device or in host memory. Compares tokens exactly."""
        nodes = self._known(keys, prefix)
        on_device = 0
        for node in nodes:
            if not node.page:
                break
            on_device += 1
        usable = on_device
        while usable < len(nodes) and self._offloaded.restorable(nodes[usable]):
            usable += 1
        if usable < len(nodes):
            self._offloaded.forget(nodes[usable])
        if usable > on_device and self.host_tier is not None and not self.host_tier.worth(usable - on_device):
            usable = on_device
        if not self.sides:
            return PrefixMatch(nodes[:usable], on_device, usable)
        count = self.sides.deepest(nodes[:usable], SideCache.usable)
        return PrefixMatch(nodes[:count], min(on_device, count), usable)

    def beginning(self, key: int, tokens: IntArray) -> tuple[Node | None, int]:
        """Return a page on the device that follows the page with this key and begins like `tokens`, and the number of
        common tokens.

        None and 0 if no page is worth copying from. The tokens before the page are not compared.
        """
        node = self._beginnings.find(key, tokens)
        return (None, 0) if node is None else (node, common(self._table.tokens_of(node), tokens))

    def to_fetch(self, keys: Sequence[int], prefix: Prefix) -> tuple[list[bytes], int]:
        """Return the digests of pages to fetch from disk, so that every known page of a prompt can be matched.

        The count is the number of other pages, already in host memory, that would become usable too.
        """
        digests, in_host = [], 0
        for node in self.continuable(self._known(keys, prefix)):
            if node.page:
                continue
            if self._offloaded.restorable(node):
                in_host += 1
            elif self._offloaded.on_disk(node):
                digests.append(self.digest_of(node))
            else:
                break
        return digests, in_host

    def sides_to_fetch(self, keys: Sequence[int], prefix: Prefix) -> list[tuple[SideCache, list[bytes]]]:
        """Return the entries of each side cache to fetch from disk, to continue where `to_fetch` ends."""
        if not self.sides:
            return []
        nodes = self.continuable(self._known(keys, prefix))
        return [
            (side, [self.digest_of(node) for node in nodes[-side.span :] if not side.above_disk(node)])
            for side in self.sides
        ]

    def continuable(self, nodes: list[Node]) -> list[Node]:
        """Return `nodes` up to the deepest one with entries in side caches, in any tier, to continue from."""
        return nodes[: self.sides.deepest(nodes, SideCache.kept)] if self.sides else nodes

    def lock(self, match: PrefixMatch) -> list[int]:
        """Take a reference to the matched device pages, for a sequence that is admitted now."""
        pages = match.pages
        self.pool.share(pages)
        now = self.clock()
        for node in match.nodes:
            node.visits += 1
            node.requested = True
            self._leaves.record_use(node, now)
        self._counts["matches"] += 1
        self._counts["hits"] += bool(match.nodes)
        self._counts["device_hit_pages"] += match.on_device
        self._counts["host_hit_pages"] += len(match.nodes) - match.on_device
        self._counts["stateless_pages"] += match.reached - len(match.nodes)
        return pages

    def restore(self, match: PrefixMatch, pages: Sequence[int]) -> list[PageMove]:
        """Attach fresh `pages` of the admitted sequence to the matched nodes that are not on the device."""
        moves = []
        for node, page in zip(match.nodes[match.on_device :], pages, strict=True):
            self._attach(node, page)
            moves.append(PageMove(page, self.digest_of(node)))
        if self.host_tier is not None:
            for move in reversed(moves):  # so that a parent counts as used after its children
                self.host_tier.hold(move.digest)
                self.host_tier.touch(move.digest)
        self.pool.keep(pages)
        self.version += bool(moves)
        return moves

    # -- publishing

    def publish(self, parent: Node, keys: Sequence[int], tokens: IntArray, pages: Sequence[int]) -> Publication | None:
        """Take over the caller's `pages`, computed and committed, that hold `tokens` after `parent`.

        The caller holds the parent's page. Where a page was computed twice, the one that came first is shared with the
        caller, who releases its own later. None if a key is taken by another prefix.
        """
        self.pool.check_held(pages)  # before anything is changed
        known = self._table.find(parent, keys, tokens)
        now = self.clock()
        start = len(known) * self.page_size
        keep = list(pages[len(known) :])
        added = self._table.add(known[-1] if known else parent, keys[len(known) :], tokens[start:], now, keep)
        if added is None:
            return None
        for node in added:
            node.requested = True
            self._leaves.record_use(node, now)
            self._beginnings.add(node, self._table.tokens_of(node))
        used, shared, duplicates = list(pages), [], []
        for index, node in enumerate(known):
            node.requested = True
            self._leaves.record_use(node, now)
            if not node.page:
                self._attach(node, pages[index])
                self._beginnings.add(node, self._table.tokens_of(node))
                keep.append(pages[index])
            else:
                used[index] = node.page
                shared.append(node.page)
                duplicates.append(pages[index])
        self.pool.share(shared)
        self.pool.keep(keep)
        self.version += 1
        self._counts["published_pages"] += len(keep)
        self._counts["merged_pages"] += len(duplicates)
        return Publication((known + added)[-1] if keys else parent, used, duplicates)

    def graft(self, tokens: IntArray, *, after: Node | None = None) -> list[Node] | None:
        """Make every full page of `tokens` known, following `after` or the root; lower tiers may have the payloads.

        Return the nodes, with a `last_use` of 0 for new ones; None if a key is taken by another prefix.
        """
        parent = self.root if after is None else after
        keys = page_keys(tokens, self.page_size, first=parent.depth, previous=parent.key)
        known = self._table.find(parent, keys, tokens)
        rest = tokens[len(known) * self.page_size : len(keys) * self.page_size]
        added = self._table.add(known[-1] if known else parent, keys[len(known) :], rest, 0.0)
        if added is None:
            return None
        for node in added:
            self._offloaded.add(node)
        self.version += 1
        return known + added

    def learn(self, keys: Sequence[int], prefix: Prefix) -> None:
        """Make the pages of a prompt known that a lower tier has from earlier sessions.

        They are found by their digests, up to the first that is missing: the cost does not grow with what is stored.
        """
        nodes, tier, size = self._known(keys, prefix), self.host_tier, self.page_size
        if tier is None or len(nodes) == len(keys):
            return
        last = nodes[-1] if nodes else self.root_of(prefix.namespace)
        first = count = len(nodes)
        digest = self.digest_of(last)
        while count < len(keys):
            digest = page_digest(digest, prefix.tokens[count * size : (count + 1) * size])
            if not tier.has(digest):
                break
            count += 1
        if count > first:
            self.graft(prefix.tokens[first * size : count * size], after=last)

    # -- releasing

    def unreference(self, node: Node) -> None:
        """Note that a sequence has released its pages, with `node` as the deepest."""
        # It was in use until now. Its ancestors may keep an older time, since they leave after it in any case.
        self._leaves.record_use(node, self.clock())
        while not node.page and node.parent is not None:  # taken off the device meanwhile: a restore has failed
            node = node.parent
        self._leaves.offer(node)

    def offer(self, key: int, page: int) -> None:
        """Note that a page has one holder less. Its node is the one with this key, if it is in the tree."""
        node = self._table.get(key)
        if node is not None and node.page == page:
            self._leaves.offer(node)

    def evict(self, count: int, *, read_out: bool = True) -> list[PageMove]:
        """Free up to `count` device pages; returns the pages to read out before they are overwritten."""
        moves = []
        for _ in range(count):
            node = self._leaves.pop()
            if node is None:
                break
            move = self._offloaded.depart(node) if read_out else None
            if move is not None:
                moves.append(move)
            self._leave(node, read_out=read_out)
            self._offloaded.forget(node)
            self._offloaded.sweep()
            self._counts["evicted_pages"] += 1
        self._counts["offloaded_pages"] += len(moves)
        self.version += 1
        return moves

    def offload_done(self, moves: Sequence[PageMove]) -> None:
        """End the read-out of pages once their step was committed or has failed: the host tier decides from now on."""
        self._offloaded.offload_done(moves)
        self.version += bool(moves)
        if self.host_tier is not None:
            self.host_tier.trim()

    def restore_done(self, moves: Sequence[PageMove]) -> None:
        """End the restore of pages after their step: the host tier may drop their payloads."""
        if self.host_tier is not None:
            for move in moves:
                self.host_tier.release(move.digest)

    def detach(self, moves: Sequence[PageMove]) -> None:
        """Take pages that are broken or in quarantine off the device, with all pages below them."""
        broken = {move.page for move in moves}
        detached = [node for node in self if node.page and (node.page in broken or is_below(node, broken))]
        for node in reversed(detached):
            self._leave(node)
        self.version += bool(detached)

    def pin(self, prefix: Prefix) -> int:
        """Keep every page of a prompt that is known now until `unpin`; returns how many tokens that covers."""
        nodes = self.find(prefix)
        fresh = [node for node in nodes if not node.pins]
        self.pool.share([node.page for node in fresh if node.page])
        for node in nodes:
            node.pins += 1
        self.sides.pin(nodes)
        if self.host_tier is not None:
            for node in fresh:
                self.host_tier.hold(self.digest_of(node))
        self.pinned_pages += len(fresh)
        return len(nodes) * self.page_size

    def unpin(self, prefix: Prefix) -> int:
        """Undo one `pin` of the same prompt; returns how many tokens are no longer pinned."""
        nodes = [node for node in self.find(prefix) if node.pins]
        for node in nodes:
            node.pins -= 1
        return self._unpinned(nodes) * self.page_size

    def _unpinned(self, nodes: list[Node]) -> int:
        """Let go of the nodes that no pin covers any more. Return how many these are."""
        self.sides.unpin(nodes)
        unpinned = [node for node in nodes if not node.pins]
        self.pool.release([node.page for node in unpinned if node.page])
        for node in unpinned:
            self._leaves.offer(node)
            if self.host_tier is not None:
                self.host_tier.release(self.digest_of(node))
        self.pinned_pages -= len(unpinned)
        return len(unpinned)

    def pinned_prefix(self, prefix: Prefix) -> int:
        """Return how many leading pages of a prompt are pinned and can be used, which needs side caches' entries too.

        These stay on the device as long as the pins.
        """
        return self.sides.ends_pin([node for node in self.find(prefix) if node.pins])

    def drop_altered(self, altered: str, discard: Callable[[bytes], object] | None = None) -> None:
        """Drop the pages that depend on a digest, and their pins, except pages in use.

        `discard` drops a payload in host memory.
        """
        roots = {self._table.namespace(digest) for digest in self._altered.pop(altered, ())}
        nodes: dict[Node, None] = {}
        for node in self:  # parents come first
            if node.parent in roots or node.parent in nodes:
                nodes[node] = None
        self._drop(nodes, discard)

    def known(self, key: int) -> Node | None:
        """Return the node with this key, if it is still in the tree."""
        return self._table.get(key)

    def path(self, node: Node) -> IntArray:
        """Return the tokens of a node's page and of all pages before it."""
        parts = []
        while node.parent is not None:
            parts.append(self.tokens_of(node))
            node = node.parent
        return np.concatenate(parts[::-1])

    def drop(self, top: Node, discard: Callable[[bytes], object] | None = None) -> int:
        """Drop a page and all pages after it, except pages in use and pinned ones. Return how many left the device.

        `discard` drops a payload in host memory.
        """
        nodes = {top: None}
        for node in self:  # parents come first
            if node.parent in nodes:
                nodes[node] = None
        for node in [node for node in nodes if node.pins]:
            above: Node | None = node
            while above in nodes:  # what comes before a pinned page stays with it
                del nodes[above]
                above = above.parent if above is not None else None
        return self._drop(nodes, discard)

    def _drop(self, nodes: dict[Node, None], discard: Callable[[bytes], object] | None) -> int:
        """Drop nodes, parents first, and their pins. Return how many left the device."""
        pinned = [node for node in nodes if node.pins]
        for node in pinned:  # with its name gone, nothing could undo its pins
            node.pins = 0
        self._unpinned(pinned)
        left = 0
        for node in reversed(nodes):
            if node.page and not node.device_children and self.pool.references(node.page) == 1:
                self._leave(node)
                left += 1
            if not node.page:
                if discard is not None:
                    discard(self.digest_of(node))
                self._offloaded.forget(node)
        self.version += bool(nodes)
        return left

    def reset(self, root_key: bytes | None = None, *, keep: bool = False) -> None:
        """Forget everything, pins included. Pages that sequences hold return to the pool when these release them.

        With `keep`, nodes and their payloads below the device are set aside under the old root, and are there again
        when a later `keep` comes back to it. No node may have a page then.
        """
        self.sides.clear(keep=keep)
        if keep:
            self._set_aside()
        else:
            self._aside.clear()
        for node in self:
            if node.page:
                if node.pins:
                    self.pool.release([node.page])
                self.pool.drop(node.page)
                node.page = 0
        self.root_key = self.root_key if root_key is None else root_key
        self._forgotten += self._offloaded.forgotten
        self._offloaded.forgotten = 0
        kept = self._aside.pop(self.root_key, None)
        self._table, self._offloaded = self._empty() if kept is None else kept
        self._beginnings = Beginnings(self.least_copied)
        self._altered.clear()
        self._leaves.clear()
        if self.host_tier is not None and not keep:
            self.host_tier.clear()
        for data in self.data:
            data.clear(self.root_key)
        self.pinned_pages = 0
        self.generation += 1
        self.version += 1

    def _empty(self) -> tuple[NodeTable, OffloadedNodes]:
        table = NodeTable(self.page_size, self.root_key)
        return table, OffloadedNodes(table, self.host_tier)

    def _set_aside(self) -> None:
        assert not any(node.page or node.pins for node in self), "pages are read out before their nodes are set aside"
        self._aside[self.root_key] = self._table, self._offloaded
        while len(self._aside) > MAX_ASIDE:
            del self._aside[next(iter(self._aside))]  # the tier drops their payloads when it needs the room

    # -- statistics

    def statistics(self) -> CacheStatistics:
        kept, cached, forgotten = self.pool.cache_refs, self.pool.cached, self._forgotten + self._offloaded.forgotten
        counts = self._counts | {
            "states_taken": sum(side.taken for side in self.sides),
            "states_restored": sum(side.restored for side in self.sides),
            "states_evicted": sum(side.evicted for side in self.sides),
        }
        return CacheStatistics(len(self), kept, cached, self.pinned_pages, forgotten, len(self.sides), **counts)

    def references(self) -> NDArray[np.int32]:
        """Return how many references to each page the tree accounts for."""
        counts = np.zeros(self.pool.num_pages, np.int32)
        for node in self:
            counts[node.page] += (1 + bool(node.pins)) * bool(node.page)
        return counts

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree is sound and agrees with the pool; walks all of it."""
        self._table.check_integrity()
        pages = [node.page for node in self if node.page]
        assert len(set(pages)) == len(pages) == self.pool.cache_refs, (
            "a page is in the tree twice, or kept without a node"
        )
        assert all(self.pool.is_kept(page) for page in pages), "a node's page is not kept"
        assert self.pinned_pages == sum(bool(node.pins) for node in self), "the count of pinned pages drifted"
        assert all(node in self._table for side in self.sides for node in side), "a side cache has a node that is gone"
        self._beginnings.check_integrity()
        for data in self.data:
            data.check_integrity()

    # -- internal

    def _attach(self, node: Node, page: int) -> None:
        """Give a node its device page. The caller tells the pool to keep the page."""
        assert node.parent is not None
        node.page = page
        node.parent.device_children += 1
        if node.pins:
            self.pool.share([page])

    def _leave(self, node: Node, *, read_out: bool = False) -> None:
        """Take a node's device page away, and its entries in side caches, which are offloaded if it is `read_out`."""
        parent = node.parent
        assert parent is not None
        self.sides.leave(node, read_out=read_out)
        if node.pins:
            self.pool.release([node.page])
        self._beginnings.remove(node, self._table.tokens_of(node))
        self.pool.drop(node.page)
        node.page = 0
        parent.device_children -= 1
        self._leaves.offer(parent)
        self._offloaded.add(node)
