"""States in the prefix tree: which nodes have one, in which slots of the device, and which one leaves next.

Layers with states have no pages: all that they know of a prefix is one state, which each token changes. So a prompt can
continue a cached prefix only at a node that has the state behind it. States are large beside pages and few nodes have
one. They have slots of their own, and leave them by their own order: the least recently used first, whatever pages do.

    take ─► attach          a step writes a state to a free slot; once it is committed, a node gets it
    hold, release           a sequence is going to read a slot: it keeps its content until then
    restore                 a node's state comes back from the tier below, into a slot that was free
    leave                   a node loses its slot; the state goes to the tier below, if there is one

A slot is free, or has an owner (a node), or holders (sequences), or both. `moves` has the transfers for the step that
is being planned: reading out comes first, then filling, then the step's rows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from rekindle._src.core.records import PageMove
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.offloaded import TierLike

Moves = tuple[tuple[PageMove, ...], tuple[PageMove, ...]]


class TreeStates:
    """The slots for states that the tree may have. Nodes at multiples of `step` tokens can have one."""

    def __init__(self, slots: range, step: int, page_size: int, tier: TierLike | None = None) -> None:
        assert step % page_size == 0, "states belong to whole pages"
        self.step, self.tier = step, tier
        self.digest_of: Callable[[Node], bytes]  # set by the tree
        self._pages = step // page_size
        self._slots = slots
        self._free = list(reversed(slots))
        self._holds: Counter[int] = Counter()
        self._owners: OrderedDict[int, Node] = OrderedDict()  # by slot, the least recently used first
        self._out: list[PageMove] = []
        self._in: list[PageMove] = []
        self.taken = self.restored = self.evicted = 0

    def __len__(self) -> int:
        return len(self._owners)

    def floor(self, position: int) -> int:
        """Return the last position up to `position` at which there may be a state."""
        return position // self.step * self.step

    def usable(self, node: Node) -> bool:
        """True if a sequence can continue behind `node` now: its state is on the device, or can be brought there."""
        if node.state:
            return True
        return self.in_host_memory(node) and bool(self._free or self._evictable())

    def in_host_memory(self, node: Node) -> bool:
        """True if the state of `node` is in host memory."""
        return self.tier is not None and self._may_have(node) and self.digest_of(node) in self.tier

    def kept(self, node: Node) -> bool:
        """True if the state of `node` is on the device, or in a tier that can bring it."""
        if node.state:
            return True
        return self.tier is not None and self._may_have(node) and self.tier.has(self.digest_of(node))

    def deepest(self, nodes: Sequence[Node], test: Callable[[Node], bool]) -> int:
        """Return how many of `nodes`, a path from the root, end with the deepest one whose state passes `test`."""
        for count in range(len(nodes) // self._pages * self._pages, 0, -self._pages):
            if test(nodes[count - 1]):
                return count
        return 0

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

    def release(self, slot: int) -> None:
        """Undo one `hold`, or the one of `take`."""
        self._holds[slot] -= 1
        assert self._holds[slot] >= 0, f"slot {slot} is released too often"
        if not self._holds[slot]:
            del self._holds[slot]
            if slot not in self._owners:
                self._free.append(slot)

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
        self._owners.move_to_end(node.state)

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
        if read_out and not arriving and self.tier is not None and self.tier.should_offload(self.digest_of(node)):
            self._out.append(PageMove(slot, self.digest_of(node)))
        if slot not in self._holds:
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
        assert held is None or held == self._holds, f"slots are held {self._holds}, expected {held}"

    def _may_have(self, node: Node) -> bool:
        return node.depth > 0 and node.depth % self._pages == 0

    def _evictable(self) -> int:
        """Return the slot whose state leaves next; 0 if there is none."""
        return next((slot for slot, node in self._owners.items() if not (self._holds.get(slot) or node.pins)), 0)
