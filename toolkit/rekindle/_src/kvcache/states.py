"""States in the prefix tree, or pages of layers with a window: which nodes have one, in which slots, and which leaves.

Layers with states have no pages: all that they know of a prefix is one state, which each token changes. So a prompt can
continue a cached prefix only at a node that has the state after its tokens. Layers with a window give back the pages
that the window has passed: a prompt can continue only at a node up to which all pages of the window are there.
`TreeStates` are slots of both kinds: a prompt continues after a node if the last few nodes up to it have their slots,
one node for states, and as many as a window has pages.

They have slots of their own, and leave them by their own order: the least recently used first, whatever pages do.

    take ─► attach          a step writes a state to a free slot; once it is committed, a node gets it
    hold, release           a sequence is going to read a slot: it keeps its content until then
    restore                 a node's state comes back from the tier below, into a slot that was free
    leave                   a node loses its slot; the state goes to the tier below, if there is one

A slot is free, or has an owner (a node), or holders (sequences), or both. `moves` has the transfers for the step that
is being planned: reading out comes first, then filling, then the step's rows.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from rekindle._src.core.records import PageMove
from rekindle._src.kvcache.node import Node, TierLike

Moves = tuple[tuple[PageMove, ...], tuple[PageMove, ...]]


class TreeStates:
    """The slots for states that the tree may have. Nodes at multiples of `step` tokens can have one."""

    def __init__(self, slots: range, step: int, page_size: int, tier: TierLike | None = None, span: int = 1) -> None:
        """A prompt continues after a node if the last `span` nodes up to it that can have a slot have one."""
        assert step % page_size == 0, "states belong to whole pages"
        self.step, self.tier, self.span = step, tier, span
        self.digest_of: Callable[[Node], bytes]  # set by the tree
        self._pages = step // page_size
        self._slots = slots
        self._free = list(reversed(slots))
        self._holds: Counter[int] = Counter()
        self._owners: dict[int, Node] = {}  # by slot
        self._idle: OrderedDict[int, None] = OrderedDict()  # slots without a holder, in the order in which they leave
        self._cold: OrderedDict[int, None] = OrderedDict()  # the same, but they leave before the others and are dropped
        self._out: list[PageMove] = []
        self._in: list[PageMove] = []
        self.taken = self.restored = self.evicted = 0

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def reach(self) -> int:
        """How many pages up to the end of a text may have what its continuation needs."""
        return self.span * self._pages

    @property
    def available(self) -> int:
        """Slots that can be taken now, at least so many."""
        return max(0, len(self._free) + len(self._idle) + len(self._cold) - self.pinned)

    @property
    def pinned(self) -> int:
        """Nodes that keep their slot."""
        return 0

    def floor(self, position: int) -> int:
        """Return the last position up to `position` at which there may be a state."""
        return position // self.step * self.step

    def usable(self, node: Node) -> bool:
        """True if a sequence can continue after `node` now: its state is on the device, or can be brought there."""
        if node.state:
            return True
        return self.in_host_memory(node) and bool(self._free or self._evictable())

    def in_host_memory(self, node: Node) -> bool:
        """True if the state of `node` is in host memory."""
        return self.tier is not None and self._may_have(node) and self.digest_of(node) in self.tier

    def worth_keeping(self, node: Node) -> bool:
        """True if the state of `node` is on the device and not the next to be dropped, or in host memory."""
        return (node.state > 0 and node.state not in self._cold) or self.in_host_memory(node)

    def kept(self, node: Node) -> bool:
        """True if the state of `node` is on the device, or in a tier that can bring it."""
        if node.state:
            return True
        return self.tier is not None and self._may_have(node) and self.tier.has(self.digest_of(node))

    def deepest(self, nodes: Sequence[Node], test: Callable[[Node], bool]) -> int:
        """Return how many of `nodes`, a path from the root, lead to the deepest one after which a prompt can continue.

        It can do so if the last `span` nodes that can have a slot, up to this one, pass `test`.
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
        return self.deepest(nodes, lambda node: bool(node.state))

    def pin(self, nodes: Sequence[Node]) -> None:
        """Note that a path was pinned."""

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Note that a path was unpinned once."""

    def take(self) -> int:
        """Take a slot for a state, held once; 0 if all are held, or belong to pinned nodes."""
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
        """Give `node` the state in a slot that the caller holds; a node that has one keeps its own."""
        assert self._may_have(node), f"{node} is not at an edge of chunks"
        if node.state:
            self.touch(node)
            return
        node.state = slot
        self._owners[slot] = node
        self.taken += 1

    def touch(self, node: Node) -> None:
        """Record that the state of `node` is used now."""
        if node.state not in self._holds:
            self._unlist(node.state)
            self._idle[node.state] = None

    def restore(self, node: Node) -> int:
        """Bring the state of `node` from host memory to a slot, which the caller holds then. `usable` was checked."""
        assert self.tier is not None, "states are stored in a tier, and this tree has none"
        digest = self.digest_of(node)
        self.tier.hold(digest)
        self.tier.touch(digest)
        node.state = slot = self.take()
        assert slot, "a slot was free"
        self._owners[slot] = node
        self._in.append(PageMove(slot, digest))
        self.restored += 1
        return slot

    def leave(self, node: Node, *, read_out: bool = True) -> None:
        """Take the slot of a node away, if it has one, while a step is planned; otherwise without reading it out."""
        slot, node.state = node.state, 0
        if not slot:
            return
        del self._owners[slot]
        arriving = any(move.page == slot for move in self._in)  # planned in this very step: the payload is below still
        read_out = read_out and not arriving and slot not in self._cold
        if read_out and self.tier is not None and self.tier.should_offload(self.digest_of(node)):
            self._out.append(PageMove(slot, self.digest_of(node)))
        if slot not in self._holds:
            self._unlist(slot)
            self._free.append(slot)

    def owner(self, slot: int) -> Node | None:
        """Return the node whose state is in a slot."""
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
        """Forget every node's state, but with `keep` those below the device.

        Slots that sequences hold return when these release them.
        """
        for node in tuple(self._owners.values()):
            self.leave(node, read_out=False)
        if self.tier is not None and not keep:
            self.tier.clear()

    def check_integrity(self, held: Counter[int] | None = None) -> None:
        """Raise AssertionError unless each slot is free, owned or held, the latter as often as `held` says."""
        used = {*self._owners, *self._holds}
        assert sorted([*self._free, *used]) == list(self._slots), "a slot for states is lost, or free and used"
        assert all(node.state == slot for slot, node in self._owners.items()), "a node has the state of another"
        assert all(node.page for node in self._owners.values()), "a state is on the device without its node's page"
        leaving = sorted([*self._cold, *self._idle])
        assert leaving == sorted(set(self._owners) - set(self._holds)), "a state without a holder cannot leave"
        assert held is None or held == self._holds, f"slots are held {self._holds}, expected {held}"

    def _may_have(self, node: Node) -> bool:
        return node.depth > 0 and node.depth % self._pages == 0

    def _evictable(self) -> int:
        """Return the slot whose state leaves next; 0 if there is none."""
        leaving = itertools.chain(self._cold, self._idle)
        return next((slot for slot in leaving if not self._keeps(self._owners[slot])), 0)

    def _unlist(self, slot: int) -> None:
        self._idle.pop(slot, None)
        self._cold.pop(slot, None)

    def _keeps(self, node: Node) -> bool:
        """True if a node keeps its slot."""
        return bool(node.pins)


class TreeTails(TreeStates):
    """The pages of layers with a window. Of a pinned path, the pages stay that its end needs, if there is room."""

    def __init__(self, pages: int, page_size: int, tier: TierLike | None = None, *, span: int, least: int) -> None:
        """Number the pages from 1 on: the first one is scratch. Sequences may need `least` of them at once."""
        super().__init__(range(1, pages), page_size, page_size, tier, span)
        self._most_pinned = pages - 1 - least
        self._pinned: Counter[Node] = Counter()

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    def ends_pin(self, nodes: Sequence[Node]) -> int:
        return self.deepest(nodes, lambda node: bool(node.state) and node in self._pinned)

    def pin(self, nodes: Sequence[Node]) -> None:
        needed = nodes[-self.span :]
        room = self._most_pinned - len(self._pinned)
        if all(node.state for node in needed) and sum(node not in self._pinned for node in needed) <= room:
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
