"""Side caches: what nodes of the prefix tree have in addition to a page. A model has one for each kind, or none at all.

A `SidePlan` is the declaration of a kind for one model and config: a value, made without arrays, files or threads. The
kinds are its subclasses in `programs.side_caches`. `tiers.side_tiers.open_sides` makes a `SideCache` from each plan:
the nodes' entries, their slots on the device, the order of eviction, and the tiers below. The tree, the
scheduler, the runner, the cache writer and the views work on the side caches that a session has, and know none of them
by name.

Kinds differ in how entries are keyed (`Keying`), and that is declared. A prompt can continue after a node if the last
`span` nodes up to it that can have an entry do have one: one node where an entry stands for all tokens before it, as
many as a window has pages where an entry is a page.

Slots leave by their own order: the least recently used first, whatever pages do.

    take ─► attach          a step writes an entry to a free slot; once it is committed, a node gets it
    hold, release           a sequence is going to read a slot: it keeps its content until then
    restore                 a node's entry comes back from the tier below, into a slot that was free
    leave                   a node loses its slot; the entry goes to the tier below, if there is one

A slot is free, or has an owner (a node), or holders (sequences), or both. `moves` has the transfers for the step that
is being planned: reading out comes first, then filling, then the step's rows.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Literal, NamedTuple

from rekindle._src.core.records import PageMove
from rekindle._src.kvcache.node import Node, TierLike
from rekindle._src.kvcache.persist.identity import Identity, mark
from rekindle._src.kvcache.persist.segment import LeafSpec

Moves = tuple[tuple[PageMove, ...], tuple[PageMove, ...]]


class Keying(enum.Enum):
    """How the entries of a side cache belong to nodes, and how sequences use them."""

    BOUNDARY = "boundary"  # an entry stands for all tokens up to its node; a row reads one slot and writes another
    PAGES = "pages"  # an entry is one page of tokens, which sequences share and give back as they move on


class EntryWords(NamedTuple):
    """The words for a kind's entries in messages and views."""

    entry: str
    entries: str
    needed: str  # of a prompt that continues
    missing: str
    lacking: str  # after "without"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SidePlan:
    """The declaration of one kind, and its sizes for one model and config. Two plans are equal if their fields are."""

    # Of the kind
    name: ClassVar[str]  # of its arrays in a layer, of its programs, and in identities of stored entries
    keying: ClassVar[Keying]
    words: ClassVar[EntryWords]
    share: ClassVar[int] = 4  # one in so many bytes of host memory is for its entries
    costs: ClassVar[Literal["measured", "always", "never"]] = "always"  # an entry stands for many tokens

    # Of the model and the config
    page_size: int
    slots: int  # on the device; the first one is scratch
    first: int  # the first slot that nodes can have: those before are scratch, and of sequences alone
    spare: int = 0  # slots right before it, which sequences take for the entries after their drafts
    step: int  # tokens; a node can have an entry if its end is a multiple of it
    edge: int = 1  # prompts are cut at multiples of so many tokens
    span: int = 1  # how many such nodes in a row a prompt needs that continues after the last one
    window: int = 0  # tokens that a row reads of a run of pages, where entries are pages
    reserved: int = 0  # slots that sequences may need at once, so that no pin takes them
    leaves: tuple[LeafSpec, ...] = ()  # one entry off the device
    content: str = ""  # in identities of stored entries, after the name
    slot_bytes: int = 0  # on each device
    host_bytes: int = 0  # for entries in host memory

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry off the device."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def identity(self, pages: Identity) -> Identity:
        """Return the identity of entries that belong to pages of `pages`."""
        return dataclasses.replace(pages, layout=f"{pages.layout}{mark(self.name)}{self.content}", leaves=self.leaves)

    def cache(self, tier: TierLike | None = None, *, number: int = 0) -> SideCache:
        """Return the side cache over a tier, without entries; `number` is its place in the session's list."""
        return _CACHES[self.keying](self, tier, number)


class SideCache:
    """An opened side cache: the slots that nodes of the tree may have, and the tiers below."""

    def __init__(self, plan: SidePlan, tier: TierLike | None = None, number: int = 0) -> None:
        assert plan.step % plan.page_size == 0, "entries belong to whole pages"
        self.plan, self.tier, self.number = plan, tier, number
        self.span = plan.span
        self.digest_of: Callable[[Node], bytes]  # set by the tree
        self._pages = plan.step // plan.page_size
        self._slots = range(plan.first, plan.slots)
        self._free = list(reversed(self._slots))
        self._holds: Counter[int] = Counter()
        self._owners: dict[int, Node] = {}  # by slot
        self._owned: dict[Node, int] = {}  # the same by node
        self._idle: OrderedDict[int, None] = OrderedDict()  # slots without a holder, in the order of their eviction
        self._cold: OrderedDict[int, None] = OrderedDict()  # the same, but they leave before the others and are dropped
        self._out: list[PageMove] = []
        self._in: list[PageMove] = []
        self.taken = self.restored = self.evicted = 0

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[Node]:
        """Yield the nodes that have an entry on the device."""
        return iter(self._owned)

    @property
    def reach(self) -> int:
        """How many pages up to the end of a text may have what its continuation needs."""
        return self.span * self._pages

    @property
    def available(self) -> int:
        """Slots that can be taken now."""
        return len(self._free) + len(self._idle) + len(self._cold) - self._kept()

    def floor(self, position: int) -> int:
        """Return the last position up to `position` at which there may be an entry."""
        return position // self.plan.step * self.plan.step

    def slot(self, node: Node) -> int:
        """Return the slot of a node's entry; 0 if it has none on the device."""
        return self._owned.get(node, 0)

    def on_device(self, node: Node) -> bool:
        """True if the entry of `node` is on the device."""
        return node in self._owned

    def usable(self, node: Node) -> bool:
        """True if a sequence can continue after `node` now: its entry is on the device, or can be brought there."""
        if node in self._owned:
            return True
        return self.in_host_memory(node) and bool(self._free or self._evictable())

    def in_host_memory(self, node: Node) -> bool:
        """True if the entry of `node` is in host memory."""
        return self.tier is not None and self._may_have(node) and self.digest_of(node) in self.tier

    def above_disk(self, node: Node) -> bool:
        """True if the entry of `node` is on the device or in host memory."""
        return node in self._owned or self.in_host_memory(node)

    def worth_keeping(self, node: Node) -> bool:
        """True if the entry of `node` is on the device and not the next to be dropped, or in host memory."""
        slot = self._owned.get(node, 0)
        return (slot > 0 and slot not in self._cold) or self.in_host_memory(node)

    def kept(self, node: Node) -> bool:
        """True if the entry of `node` is on the device, or in a tier that can bring it."""
        if node in self._owned:
            return True
        return self.tier is not None and self._may_have(node) and self.tier.has(self.digest_of(node))

    def deepest(self, nodes: Sequence[Node], test: Callable[[Node], bool]) -> int:
        """Return how many of `nodes`, a path from the root, lead to the deepest one after which a prompt can continue.

        It can do so if the last `span` nodes that can have an entry, up to this one, pass `test`.
        """
        return self.deepest_of(len(nodes), lambda index: test(nodes[index]))

    def deepest_of(self, count: int, test: Callable[[int], bool]) -> int:
        """Return the same for nodes by their index."""
        step = self._pages
        end = count // step * step
        at = end
        while at:
            if not test(at - 1):
                end = at - step
            elif end - at >= (self.span - 1) * step:
                return end
            at -= step
        return end

    def ends_pin(self, nodes: Sequence[Node]) -> int:
        """Return the number of leading `nodes`, all of them pinned, after which a prompt can continue at any time."""
        return self.deepest(nodes, self.on_device)

    def pin(self, nodes: Sequence[Node]) -> None:
        """Note that a path was pinned."""

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Note that a path was unpinned once."""

    def take(self) -> int:
        """Take a slot for an entry, held once; 0 if all are held, or belong to pinned nodes."""
        slot = self._evictable() if not self._free else 0
        if slot:
            self.leave(self._owners[slot])
            self.evicted += 1
        if not self._free:
            return 0
        slot = self._free.pop()
        self._holds[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Keep the content of a slot until as many calls of `release`."""
        self._holds[slot] += 1
        self._unlist(slot)

    def release(self, slot: int, *, cold: bool = False) -> None:
        """Undo one `hold`, or the one of `take`. A `cold` slot is the next to leave, and is not read out then."""
        self._holds[slot] -= 1
        assert self._holds[slot] >= 0, f"slot {slot} is released too often"
        if self._holds[slot]:
            return
        del self._holds[slot]
        if slot not in self._owners:
            self._free.append(slot)
            return
        (self._cold if cold else self._idle)[slot] = None

    def attach(self, node: Node, slot: int) -> None:
        """Give `node` the entry in a slot that the caller holds; a node that has one keeps its own."""
        assert self._may_have(node), f"{node} is not at an edge of chunks"
        if node in self._owned:
            self.touch(node)
            return
        self._own(node, slot)
        self.taken += 1

    def touch(self, node: Node) -> None:
        """Record that the entry of `node` is used now."""
        slot = self._owned[node]
        if slot not in self._holds:
            self._unlist(slot)
            self._idle[slot] = None

    def restore(self, node: Node) -> int:
        """Bring the entry of `node` from host memory to a slot, which the caller holds then. `usable` was checked."""
        assert self.tier is not None, "entries are stored in a tier, and this tree has none"
        digest = self.digest_of(node)
        self.tier.hold(digest)
        self.tier.touch(digest)
        slot = self.take()
        assert slot, "a slot was free"
        self._own(node, slot)
        self._in.append(PageMove(slot, digest, self.number))
        self.restored += 1
        return slot

    def leave(self, node: Node, *, read_out: bool = True) -> None:
        """Take the slot of a node away, if it has one, while a step is planned; otherwise without reading it out."""
        slot = self._owned.pop(node, 0)
        if not slot:
            return
        del self._owners[slot]
        arriving = any(move.page == slot for move in self._in)  # planned in this very step: the payload is below still
        read_out = read_out and not arriving and slot not in self._cold
        if read_out and self.tier is not None and self.tier.should_offload(self.digest_of(node)):
            self._out.append(PageMove(slot, self.digest_of(node), self.number))
        if slot not in self._holds:
            self._unlist(slot)
            self._free.append(slot)

    def owner(self, slot: int) -> Node | None:
        """Return the node that owns the entry in a slot."""
        return self._owners.get(slot)

    def moves(self) -> Moves:
        """Take out the transfers, out and in, of the step being planned."""
        moves = tuple(self._out), tuple(self._in)
        self._out, self._in = [], []
        return moves

    def done(self, arrived: Sequence[PageMove]) -> None:
        """End the transfers of a step that was committed or has failed: the tier may drop payloads."""
        if self.tier is not None:
            for move in arrived:
                self.tier.release(move.digest)
            self.tier.trim()

    def clear(self, *, keep: bool = False) -> None:
        """Forget every node's entry, but with `keep` those below the device.

        Slots that sequences hold return when these release them.
        """
        for node in tuple(self._owners.values()):
            self.leave(node, read_out=False)
        if self.tier is not None and not keep:
            self.tier.clear()

    def check_integrity(self, held: Counter[int] | None = None) -> None:
        """Raise AssertionError unless each slot is free, owned or held, the latter as often as `held` says."""
        used = {*self._owners, *self._holds}
        assert sorted([*self._free, *used]) == list(self._slots), "a slot is lost, or free and used"
        assert self._owned == {node: slot for slot, node in self._owners.items()}, "a node has the entry of another"
        assert all(node.page for node in self._owned), "an entry is on the device without its node's page"
        leaving = sorted([*self._cold, *self._idle])
        assert leaving == sorted(set(self._owners) - set(self._holds)), "an entry without a holder cannot leave"
        assert held is None or held == self._holds, f"slots are held {self._holds}, expected {held}"

    def _own(self, node: Node, slot: int) -> None:
        self._owners[slot], self._owned[node] = node, slot

    def _may_have(self, node: Node) -> bool:
        return node.depth > 0 and node.depth % self._pages == 0

    def _evictable(self) -> int:
        """Return the slot that will be evicted next; 0 if there is none."""
        leaving = itertools.chain(self._cold, self._idle)
        return next((slot for slot in leaving if not self._keeps(self._owners[slot])), 0)

    def _unlist(self, slot: int) -> None:
        self._idle.pop(slot, None)
        self._cold.pop(slot, None)

    def _keeps(self, node: Node) -> bool:
        """True if a node keeps its slot."""
        return bool(node.pins)

    def _kept(self) -> int:
        """Return how many of the slots without a holder their nodes keep."""
        return sum(self._keeps(self._owners[slot]) for slot in itertools.chain(self._cold, self._idle))


class SidePages(SideCache):
    """A side cache of pages. Of a pinned path, the pages that its end needs stay if there is room."""

    def __init__(self, plan: SidePlan, tier: TierLike | None = None, number: int = 0) -> None:
        super().__init__(plan, tier, number)
        self._most_pinned = len(self._slots) - plan.reserved
        self._pinned: Counter[Node] = Counter()

    def ends_pin(self, nodes: Sequence[Node]) -> int:
        return self.deepest(nodes, lambda node: node in self._owned and node in self._pinned)

    def pin(self, nodes: Sequence[Node]) -> None:
        needed = nodes[-self.span :]
        room = self._most_pinned - len(self._pinned)
        if all(map(self.on_device, needed)) and sum(node not in self._pinned for node in needed) <= room:
            self._pinned.update(needed)

    def unpin(self, nodes: Sequence[Node]) -> None:
        self._pinned.subtract(node for node in nodes[-self.span :] if node in self._pinned)
        for node in nodes:
            if node in self._pinned and not (node.pins and self._pinned[node]):
                del self._pinned[node]

    def clear(self, *, keep: bool = False) -> None:
        self._pinned.clear()
        super().clear(keep=keep)

    def _keeps(self, node: Node) -> bool:
        return node in self._pinned

    def _kept(self) -> int:
        slots = filter(None, map(self.slot, self._pinned))  # one may have left: its content was lost
        return sum(slot not in self._holds for slot in slots)


_CACHES: dict[Keying, type[SideCache]] = {Keying.BOUNDARY: SideCache, Keying.PAGES: SidePages}


class SideCaches:
    """The side caches of a tree as one. Of a model without any, every node can be continued."""

    def __init__(self, caches: Sequence[SideCache] = ()) -> None:
        self._caches = tuple(caches)

    def __bool__(self) -> bool:
        return bool(self._caches)

    def __iter__(self) -> Iterator[SideCache]:
        return iter(self._caches)

    def __len__(self) -> int:
        """Return how many entries are on the device."""
        return sum(map(len, self._caches))

    @property
    def reach(self) -> int:
        """How many pages up to the end of a text may have what its continuation needs."""
        return max((cache.reach for cache in self._caches), default=0)

    def deepest(self, nodes: Sequence[Node], test: Callable[[SideCache, Node], bool]) -> int:
        """Return how many of `nodes`, a path from the root, lead to the deepest node after which a prompt can continue.

        The entries that it needs from each side cache pass `test` there.
        """
        return self.deepest_of(len(nodes), lambda cache, index: test(cache, nodes[index]))

    def deepest_of(self, count: int, test: Callable[[SideCache, int], bool]) -> int:
        """Return the same for nodes by their index."""
        while True:
            end = count
            for cache in self._caches:
                end = cache.deepest_of(end, partial(test, cache))
            if end == count or len(self._caches) == 1:
                return end
            count = end  # where one can be continued, another may not

    def ends_pin(self, nodes: Sequence[Node]) -> int:
        """Return the number of leading `nodes`, all of them pinned, after which a prompt can continue at any time."""
        count = len(nodes)
        while (end := min((cache.ends_pin(nodes[:count]) for cache in self._caches), default=count)) < count:
            count = end
        return count

    def pin(self, nodes: Sequence[Node]) -> None:
        """Note that a path was pinned."""
        for cache in self._caches:
            cache.pin(nodes)

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Note that a path was unpinned once."""
        for cache in self._caches:
            cache.unpin(nodes)

    def leave(self, node: Node, *, read_out: bool) -> None:
        """Take the slots of a node away."""
        for cache in self._caches:
            cache.leave(node, read_out=read_out)

    def clear(self, *, keep: bool) -> None:
        """Forget every node's entries, but with `keep` those below the device."""
        for cache in self._caches:
            cache.clear(keep=keep)
