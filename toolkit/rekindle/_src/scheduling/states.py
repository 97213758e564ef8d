"""The states of sequences: which slot each row reads and writes, and where a sequence leaves a state for the tree.

A running sequence has a slot of its own. Its first row after a hit reads the tree's slot instead, and a row that ends
where a state is to be left writes a slot of the tree's, which the next row reads. Nothing is copied, and what a step
reads it does not overwrite.

States are left where other prompts are likely to continue:

- at the last edge of the prompt
- where the prompt's cached pages end, if the states ended before: there prompts branch
- where a request that waits for this one's pages will branch off
- at each edge of the generated text. The one before it is given up then, unless it was used: what stays is the
  state at the end of a turn

Prompts are cut there, and otherwise at multiples of `Limits.edge`, where kernels end their chunks too. So a prompt is
added up in the same order whether it is cold, cached, cut or begun again.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable

from rekindle._src.core.records import LostPage, PageMove, StepPlan
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.states import Moves, TreeStates
from rekindle._src.kvcache.tree import PrefixMatch
from rekindle._src.scheduling.sequence import Limits, Sequence, StateTrail


class NoStates:
    """The states of models that have none: rows have no slots, and prompts are cut anywhere."""

    on_tree = False  # nodes of the tree have something of theirs
    inside = True  # a sequence may continue before its last cached token, which it then computes for its logits
    drafts = True  # tokens can be taken back
    ahead = False  # requests that wait for others' pages are parked before the step's rows are planned
    least = 1  # tokens that have to be left of a step's budget for another prompt

    def cut(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of its prompt the next row of a sequence computes; 0 if it has to wait."""
        return min(budget, sequence.target - sequence.planned)

    def slots(self, sequence: Sequence, length: int) -> tuple[int, int]:
        """Return the slots that the next row reads and writes; it computes `length` tokens."""
        return 0, 0

    def cover(self, sequence: Sequence, end: int) -> None:
        """Take what rows up to the position `end` need."""

    def admit(self, sequence: Sequence, match: PrefixMatch, *, fetched: bool) -> None:
        """Take what a sequence that is admitted now continues."""

    def shared(self, owner: Sequence | None, pages: int) -> int:
        """Return how many of `pages`, which `owner` computes, another sequence will be able to use."""
        return pages

    def publish(self, sequence: Sequence, node: Node | None, last_step: int) -> None:
        """Give what was committed to `node`, the sequence's deepest one, and those before it; None: its tree is gone.

        `last_step` is the step that was planned last.
        """

    def recede(self, sequence: Sequence) -> None:
        """Give back what a sequence no longer needs, now that a row was committed."""

    def collect(self, oldest_step: int | None) -> None:
        """Release what no step in flight reads; `oldest_step` is the oldest one in flight."""

    def held(self, sequence: Sequence) -> Iterable[int]:
        """Return the slots of the tree that a sequence continues."""
        return ()

    def release(self, sequence: Sequence) -> None:
        """Return what a sequence holds that no step in flight contains."""

    def moves(self) -> Moves:
        """Take out the transfers of the step being planned, whose rows are all there."""
        return (), ()

    def vacate(self) -> tuple[PageMove, ...]:
        """Return what waits to be read out, because the slots are about to be freed."""
        return ()

    def done(self, plan: StepPlan) -> None:
        """End the transfers of a step that was committed or has failed."""

    def lose(self, moves: Iterable[PageMove]) -> None:
        """Take states that could not be filled from their nodes."""

    def discard(self, lost: Iterable[LostPage]) -> None:
        """Never offer again what a step could not fill."""

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless slots are held as often as sequences say."""


class WholePrompts(NoStates):
    """Like `NoStates`, for models whose tokens see later ones: a prompt is computed in one step, or waits for one."""

    def cut(self, sequence: Sequence, budget: int) -> int:
        length = sequence.target - sequence.planned
        return length if length <= budget else 0


class OnTree(NoStates):
    """The base of those whose slots nodes of the tree have, too."""

    on_tree = True

    def __init__(self, tree: TreeStates) -> None:
        self._tree = tree

    def moves(self) -> Moves:
        return self._tree.moves()

    def vacate(self) -> tuple[PageMove, ...]:
        return self._tree.moves()[0]

    def done(self, plan: StepPlan) -> None:
        self._tree.done(plan.states_in)

    def lose(self, moves: Iterable[PageMove]) -> None:
        for move in moves:
            node = self._tree.owner(move.page)
            if node is not None:
                self._tree.leave(node, read_out=False)

    def discard(self, lost: Iterable[LostPage]) -> None:
        if self._tree.tier is not None:
            for one in lost:
                self._tree.tier.discard(one.move.digest)


class States(OnTree):
    """The states of models that have some, over the slots of the tree."""

    inside = False
    drafts = False
    ahead = True

    def __init__(self, limits: Limits, tree: TreeStates) -> None:
        super().__init__(tree)
        self._edge, self._page_size = limits.edge, limits.page_size
        self.least = limits.edge
        self._ending: list[int] = []  # slots that rows of the step being planned read

    def cut(self, sequence: Sequence, budget: int) -> int:
        planned = sequence.planned
        stop = next((stop for stop in _trail(sequence).stops if stop > planned), sequence.target)
        end = min(planned + budget, stop)
        if end < stop:
            edge = end // self._edge * self._edge
            end = edge if edge > planned else end
        return end - planned

    def slots(self, sequence: Sequence, length: int) -> tuple[int, int]:
        trail, own, end = _trail(sequence), 1 + sequence.slot, sequence.planned + length
        if sequence.fresh:
            trail.reads = trail.held or own
        reads, writes = trail.reads, own
        if self._leaves_state(sequence, end) and (slot := self._tree.take()):
            trail.pending.append((end, slot))
            self._tree.hold(slot)
            writes = slot
        if trail.held:
            self._ending.append(trail.held)
        trail.held = 0 if writes == own else writes
        trail.reads = writes
        return reads, writes

    def admit(self, sequence: Sequence, match: PrefixMatch, *, fetched: bool) -> None:
        trail = sequence.trail = StateTrail()
        tree, size, start = self._tree, self._page_size, 0
        if match.nodes:
            node = match.nodes[-1]
            start = node.depth * size
            if node.state:
                trail.source, trail.held = "on the device", node.state
                tree.hold(node.state)
            else:
                trail.source, trail.held = "on disk" if fetched else "in host memory", tree.restore(node)
            tree.touch(node)
        trail.again = match.reached * size - start
        last = sequence.known - 1  # its last token is computed in any case
        stops = {tree.floor(last), tree.floor(min(match.reached * size, last))}
        trail.stops = sorted(stop for stop in stops if stop > start)

    def shared(self, owner: Sequence | None, pages: int) -> int:
        position = self._tree.floor(pages * self._page_size)
        if owner is None or owner.trail is None or not position:
            return 0
        stops = owner.trail.stops
        if position not in stops:
            if not owner.planned < position < owner.target:
                return 0
            bisect.insort(stops, position)
        elif position <= owner.computed:
            return 0  # it was left, and is not there any more
        return position // self._page_size

    def publish(self, sequence: Sequence, node: Node | None, last_step: int) -> None:
        trail, tree = sequence.trail, self._tree
        if trail is None or not trail.pending or trail.pending[0][0] != sequence.computed:
            return
        position, slot = trail.pending.popleft()
        if node is not None and node.depth * self._page_size == position:
            tree.attach(node, slot)
            if position >= sequence.target:
                self._replace(trail, node)
        tree.release(slot)

    def release(self, sequence: Sequence) -> None:
        trail = sequence.trail
        if trail is None:
            return
        while trail.pending:
            self._tree.release(trail.pending.popleft()[1])
        if trail.held:
            self._tree.release(trail.held)
            trail.held = 0

    def moves(self) -> Moves:
        for slot in self._ending:
            self._tree.release(slot)
        self._ending = []
        return super().moves()

    def held(self, sequence: Sequence) -> Iterable[int]:
        return [sequence.trail.held] if sequence.trail is not None and sequence.trail.held else []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        held = Counter(self._ending)
        for sequence in sequences:
            if sequence.trail is not None:
                held.update(slot for _, slot in sequence.trail.pending)
                held.update(self.held(sequence))
        self._tree.check_integrity(held)

    def _leaves_state(self, sequence: Sequence, end: int) -> bool:
        if sequence.node is None:
            return False  # it publishes nothing
        if end < sequence.target:
            return end in _trail(sequence).stops
        return self._tree.floor(end) == end

    def _replace(self, trail: StateTrail, node: Node) -> None:
        """Give up the state that the sequence's own text left before the one at `node`, unless it was used."""
        if trail.left is not None:
            before, visits = trail.left
            if before is not node and before.visits == visits and not before.pins:
                self._tree.leave(before, read_out=False)
        trail.left = node, node.visits


def _trail(sequence: Sequence) -> StateTrail:
    assert sequence.trail is not None, f"{sequence.id} has no slot for its state"
    return sequence.trail
