"""Pages of layers with a window: a sequence takes them row by row, and gives them back as its window moves past them.

A running sequence has the pages of its tokens that are not committed, and before these as many as its next page's end
may need: whoever continues there finds the whole window. What it gives back stays in the tree until the room is needed.
Pages are likely to be used again, and go to the tiers below,

- before the end of the prompt, and where its cached pages ended: there prompts branch
- where a request that waits for this one's pages will branch off
- at the end of the text

All others are the next to leave, and are dropped then.

There are enough pages for all slots, however long their sequences are (`least_pages`), or as many as layers
without a window have. So admission does not ask for them: a sequence that has its pages there has them here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.kvcache.states import TreeTails
from rekindle._src.kvcache.tree import PrefixMatch
from rekindle._src.scheduling.sequence import Limits, Sequence, Tail
from rekindle._src.scheduling.states import OnTree


class Tails(OnTree):
    """The pages of all sequences, over those of the tree."""

    _tree: TreeTails

    def __init__(self, limits: Limits, tree: TreeTails) -> None:
        super().__init__(tree)
        self._page_size, self._window = limits.page_size, limits.window
        self._retired: deque[tuple[int, list[int]]] = deque()  # merged duplicates, as those of `PageLedger`

    def cut(self, sequence: Sequence, budget: int) -> int:
        room = (_tail(sequence).end + self._tree.available) * self._page_size - sequence.planned
        return max(0, min(budget, sequence.target - sequence.planned, room))

    def slots(self, sequence: Sequence, length: int) -> tuple[int, int]:
        self.cover(sequence, sequence.planned + length)
        return 0, 0

    def cover(self, sequence: Sequence, end: int) -> None:
        tail = _tail(sequence)
        for _ in range(pages_for(end, self._page_size) - tail.end):
            page = self._tree.take()
            assert page, f"{sequence.id} has no page after a window"
            tail.pages.append(page)
            tail.changed()

    def admit(self, sequence: Sequence, match: PrefixMatch, *, fetched: bool) -> None:
        tail = sequence.tail = Tail(self._window, self._page_size)
        tree, depth = self._tree, len(match.nodes)
        tail.first, tail.attached = max(0, depth - tree.span), depth
        needed = match.nodes[tail.first :]
        for node in needed:  # before others are brought back, which may take the place of some
            if node.state:
                tree.hold(node.state)
        if depth:
            there = all(node.state for node in needed)
            tail.source = "on the device" if there else "on disk" if fetched else "in host memory"
        tail.pages = [node.state or tree.restore(node) for node in needed]
        tail.again = (match.reached - depth) * self._page_size
        tail.stops = {sequence.known // self._page_size, match.reached}

    def shared(self, owner: Sequence | None, pages: int) -> int:
        if owner is not None and owner.tail is not None:
            owner.tail.stops.add(pages)
        return pages

    def publish(self, sequence: Sequence, node: Node | None, last_step: int) -> None:
        tail, tree = sequence.tail, self._tree
        if tail is None or node is None or tail.attached >= sequence.published:
            return
        duplicates = []
        for place in range(sequence.published - 1, max(tail.attached, tail.first) - 1, -1):
            at = place - tail.first
            if not node.state:
                tree.attach(node, tail.pages[at])
            elif node.state != tail.pages[at]:
                tree.hold(node.state)
                duplicates.append(tail.pages[at])
                tail.pages[at] = node.state
                tail.changed()
            assert node.parent is not None, "the root has no page"
            node = node.parent
        tail.attached = sequence.published
        if duplicates:
            self._retired.append((last_step, duplicates))

    def recede(self, sequence: Sequence) -> None:
        tail = sequence.tail
        if tail is None:
            return
        count = sequence.computed // self._page_size - self._tree.span - tail.first
        if count <= 0:
            return
        for place, page in enumerate(tail.pages[:count], start=tail.first):
            warm = any(stop - self._tree.span <= place < stop for stop in tail.stops)
            self._tree.release(page, cold=not warm)
        del tail.pages[:count]
        tail.first += count
        tail.changed()

    def release(self, sequence: Sequence) -> None:
        if sequence.tail is not None:
            for page in sequence.tail.pages:
                self._tree.release(page)
            sequence.tail.pages = []

    def collect(self, oldest_step: int | None) -> None:
        while self._retired and (oldest_step is None or self._retired[0][0] < oldest_step):
            for page in self._retired.popleft()[1]:
                self._tree.release(page)

    def held(self, sequence: Sequence) -> Iterable[int]:
        return () if sequence.tail is None else sequence.tail.pages

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        held = Counter(page for _, pages in self._retired for page in pages)
        for sequence in sequences:
            held.update(self.held(sequence))
            if sequence.tail is not None:
                assert sequence.tail.end * self._page_size >= sequence.planned, f"{sequence.id} lacks pages"
        self._tree.check_integrity(held)


def _tail(sequence: Sequence) -> Tail:
    assert sequence.tail is not None, f"{sequence.id} was not admitted"
    return sequence.tail
