"""Entries that stand for all tokens before a node: which slot each row reads and writes, and where one is left.

A running sequence has a slot of its own. Its first row after a hit reads the tree's slot instead, and a row that ends
where an entry is to be left writes a slot of the tree's, which the next row reads. Nothing is copied, and a step
does not overwrite its own inputs.

A draft's row reads what the row before it writes, and writes a spare slot, or one of the tree's where an entry is to be
left. So the entry after each token of the step is there when the step is committed, and the sequence's next row reads
the one after the last accepted token. The others are given back.

Entries are left where other prompts are likely to continue:

- at the last edge of the prompt
- where the prompt's cached pages end, if its entries ended before: there prompts branch
- where a request that waits for this one's pages will branch off
- at each edge of the generated text. The one before it is given up then, unless it was used: what stays is the
  entry at the end of a turn

Prompts are cut there, and otherwise at multiples of `Limits.edge`, where kernels end their chunks too. So a prompt is
added up in the same order whether it is cold, cached, cut or begun again.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterable

from rekindle._src.core.records import PageRun, SlotPair
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.side import EntryWords, SideCache
from rekindle._src.kvcache.tree import PrefixMatch
from rekindle._src.scheduling.sequence import Holding, Limits, Sequence
from rekindle._src.scheduling.side_rules import SideRule


class Trail(Holding):
    """The entries of one running sequence: the slots that it reads, and where it leaves some for the tree."""

    __slots__ = ("chain", "held", "left", "pending", "reads", "stops")

    def __init__(self, words: EntryWords) -> None:
        super().__init__(words)
        self.reads = 0  # the slot of its entry, once a row was planned
        self.held = 0  # the slot that its next row reads, if that is the tree's, or a spare one
        self.chain: list[tuple[int, int]] = []  # positions and slots of entries after the rows of drafts in flight
        self.stops: list[int] = []  # positions of the prompt at which to leave an entry, ascending
        self.pending: deque[tuple[int, int]] = deque()  # positions and slots of entries left by steps in flight
        self.left: tuple[Node, int] | None = None  # the node of the last entry of its own text, and that node's visits


class Boundaries(SideRule[Trail]):
    """The entries of all sequences, over the slots of the tree."""

    inside = False
    ahead = True

    def __init__(self, limits: Limits, cache: SideCache) -> None:
        super().__init__(cache)
        self._edge, self._page_size, self._step = limits.edge, limits.page_size, cache.plan.step
        self.least = limits.edge
        self._first = cache.plan.first
        self._spare_slots = range(self._first - cache.plan.spare, self._first)
        self._spare = list(self._spare_slots)  # the free ones
        self.drafts = bool(self._spare)
        self._ending: list[int] = []  # slots that rows of the step being planned read

    def cut(self, sequence: Sequence, length: int) -> int:
        planned = sequence.epoch.planned
        stop = next((stop for stop in self.holding(sequence).stops if stop > planned), sequence.prefill_end)
        end = min(planned + length, stop)
        if end < stop:
            edge = end // self._edge * self._edge
            end = edge if edge > planned else end
        return end - planned

    def row(self, sequence: Sequence, length: int) -> SlotPair:
        trail: Trail = sequence.sides[self.number]
        own, end = 1 + sequence.epoch.slot, sequence.epoch.planned + length
        if sequence.epoch.fresh:
            trail.reads = trail.held or own
        reads, writes = trail.reads, self._left(sequence, end) or own
        if trail.held:
            self._ending.append(trail.held)
        trail.held = 0 if writes == own else writes
        trail.reads = writes
        return SlotPair(reads, writes)

    def draft_room(self) -> int:
        return len(self._spare)

    def draft(self, sequence: Sequence, position: int) -> SlotPair:
        trail = self.holding(sequence)
        if not trail.chain:
            trail.chain.append((position, trail.reads))  # after the row before the drafts
            trail.held = 0
        reads = trail.reads
        trail.reads = self._left(sequence, position + 1) or self._spare.pop()
        trail.chain.append((position + 1, trail.reads))
        return SlotPair(reads, trail.reads)

    def checked(self, sequence: Sequence) -> None:
        trail = self.holding(sequence)
        if not trail.chain:
            return  # it has left its slots
        while trail.pending and trail.pending[-1][0] > sequence.epoch.computed:
            self.cache.release(trail.pending.pop()[1])
        chain, trail.chain, own = trail.chain, [], 1 + sequence.epoch.slot
        for position, slot in chain:
            if position == sequence.epoch.computed:
                trail.reads, trail.held = slot, 0 if slot == own else slot
            elif slot != own:
                self._give_back(slot)

    def reads(self, row: SlotPair | PageRun) -> int:
        assert isinstance(row, SlotPair), "a row of this rule"
        return row.reads

    def admit(self, sequence: Sequence, match: PrefixMatch, *, fetched: bool) -> Trail:
        cache, size, start = self.cache, self._page_size, 0
        trail = Trail(cache.plan.words)
        if match.nodes:
            node = match.nodes[-1]
            start = node.depth * size
            if slot := cache.slot(node):
                trail.source, trail.held = "on the device", slot
                cache.hold(slot)
            else:
                trail.source, trail.held = "on disk" if fetched else "in host memory", cache.restore(node)
            cache.touch(node)
        trail.again = match.reached * size - start
        last = sequence.tokens.known - 1  # its last token is computed in any case
        stops = {cache.floor(last), cache.floor(min(match.reached * size, last))}
        trail.stops = sorted(stop for stop in stops if stop > start)
        return trail

    def shared(self, owner: Sequence | None, pages: int) -> int:
        position = self.cache.floor(pages * self._page_size)
        if owner is None or not owner.sides or not position:
            return 0
        stops = self.holding(owner).stops
        if position not in stops:
            if not owner.epoch.planned < position < owner.epoch.target:
                return 0
            bisect.insort(stops, position)
        elif position <= owner.epoch.computed:
            return 0  # it was left, and is not there any more
        return position // self._page_size

    def publish(self, sequence: Sequence, node: Node | None, last_step: int) -> None:
        trail: Trail = sequence.sides[self.number]
        if not trail.pending or trail.pending[0][0] != sequence.epoch.computed:
            return
        cache = self.cache
        position, slot = trail.pending.popleft()
        if node is not None and node.depth * self._page_size == position:
            cache.attach(node, slot)
            if position >= sequence.epoch.target:
                self._replace(trail, node)
        cache.release(slot)

    def release(self, sequence: Sequence) -> None:
        trail = self.holding(sequence)
        while trail.pending:
            self.cache.release(trail.pending.popleft()[1])
        for slot in self.held(sequence):
            self._give_back(slot)
        trail.held, trail.chain = 0, []

    def planned(self) -> None:
        for slot in self._ending:
            self._give_back(slot)
        self._ending = []

    def held(self, sequence: Sequence) -> Iterable[int]:
        trail, own = self.holding(sequence), 1 + sequence.epoch.slot
        slots = [trail.held, *(slot for _, slot in trail.chain)]
        return [slot for slot in slots if slot not in (0, own)]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        held = Counter(self._ending)
        for sequence in sequences:
            held.update(slot for _, slot in self.holding(sequence).pending)
            held.update(self.held(sequence))
        spare = sorted([*self._spare, *(slot for slot in held.elements() if slot < self._first)])
        assert spare == list(self._spare_slots), "a spare slot is lost, or used twice"
        self.cache.check_integrity(Counter({slot: count for slot, count in held.items() if slot >= self._first}))

    def _left(self, sequence: Sequence, end: int) -> int:
        """Return the tree's slot for the entry after a row, held twice: for the tree and as the one that is read next;
        0 if none is to be left at its `end`, or no slot is free."""
        if not self._leaves(sequence, end) or not (slot := self.cache.take()):
            return 0
        self.holding(sequence).pending.append((end, slot))
        self.cache.hold(slot)
        return slot

    def _give_back(self, slot: int) -> None:
        """Give back a slot of the tree's, or a spare one."""
        if slot < self._first:
            self._spare.append(slot)
        else:
            self.cache.release(slot)

    def _leaves(self, sequence: Sequence, end: int) -> bool:
        if sequence.tree.node is None:
            return False  # it publishes nothing
        if end < sequence.prefill_end:
            return end in self.holding(sequence).stops
        return end % self._step == 0

    def _replace(self, trail: Trail, node: Node) -> None:
        """Give up the entry that the sequence's own text left before the one at `node`, unless it was used."""
        if trail.left is not None:
            before, visits = trail.left
            if before is not node and before.visits == visits and not before.pins:
                self.cache.leave(before, read_out=False)
        trail.left = node, node.visits
