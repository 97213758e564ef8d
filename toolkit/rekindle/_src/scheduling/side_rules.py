"""How sequences use a side cache, of any kind: `SideRule`, and all of a session's as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from rekindle._src.core.records import LostPage, PageMove, PageRun, SlotPair
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.side import Moves, SideCache
from rekindle._src.kvcache.tree import PrefixMatch
from rekindle._src.scheduling.sequence import Holding, Sequence

H = TypeVar("H", bound=Holding)


class SideRule(Generic[H]):
    """How sequences use the entries of one side cache; one rule for each way to key entries.

    A sequence keeps the holding that `admit` returned until `release`.
    """

    inside = True  # a sequence may continue before its last cached token, which it then computes for its logits
    drafts = True  # rows may be drafts, which can be taken back
    repeats = False  # rows of steps that the device repeats use the same slots or pages
    ahead = False  # requests that wait for others' pages are parked before the step's rows are planned
    least = 1  # tokens that have to be left of a step's budget for another prompt

    def __init__(self, cache: SideCache) -> None:
        self.cache, self.number = cache, cache.number

    def holding(self, sequence: Sequence) -> H:
        """Return a sequence's holding in the side cache since its latest admission."""
        holding: H = sequence.sides[self.number]
        return holding

    def cut(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens of its prompt the next row of a sequence computes, at most `length`; 0: it waits."""
        return length

    def row(self, sequence: Sequence, length: int) -> SlotPair | PageRun:
        """Return the slots or pages that the next row uses; it computes `length` tokens."""
        raise NotImplementedError

    def draft_room(self) -> int | None:
        """Return how many rows of drafts there is room for in the step being planned; None: any number."""
        return None

    def draft(self, sequence: Sequence, position: int) -> SlotPair | PageRun:
        """Return the slots or pages that a draft's row at `position` uses; `cover` was called for it."""
        raise NotImplementedError

    def checked(self, sequence: Sequence) -> None:
        """Continue after the last accepted draft of the committed step, and give back the other drafts' entries."""

    def reads(self, row: SlotPair | PageRun) -> int:
        """Return the slot of an entry that a row continues, if its sequence may hold it no longer; else 0."""
        return 0

    def cover(self, sequence: Sequence, end: int) -> None:
        """Take what rows up to the position `end` need."""

    def admit(self, sequence: Sequence, match: PrefixMatch, *, fetched: bool) -> H:
        """Take the entries that an admitted sequence continues from, and return its holding."""
        raise NotImplementedError

    def shared(self, owner: Sequence | None, pages: int) -> int:
        """Return how many of `pages`, which `owner` computes, another sequence will be able to use."""
        return pages

    def publish(self, sequence: Sequence, node: Node | None, last_step: int) -> None:
        """Give committed entries to `node`, the sequence's deepest one, and nodes before it; None: its tree is gone.

        `last_step` is the step that was planned last.
        """

    def recede(self, sequence: Sequence) -> None:
        """Give back entries that a sequence no longer needs, now that a row was committed."""

    def collect(self, oldest_step: int | None) -> None:
        """Release what no step in flight reads; `oldest_step` is the oldest one in flight."""

    def held(self, sequence: Sequence) -> Iterable[int]:
        """Return the slots of the tree that a sequence continues."""
        return ()

    def release(self, sequence: Sequence) -> None:
        """Return a sequence's entries that no step in flight contains."""

    def planned(self) -> None:
        """Release what only rows of the step being planned needed, which are all there."""

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless slots are held as often as sequences say."""

    def lose(self, slot: int) -> None:
        """Take the entry in a slot, which could not be filled, from its node."""
        node = self.cache.owner(slot)
        if node is not None:
            self.cache.leave(node, read_out=False)

    def discard(self, lost: LostPage) -> None:
        """Drop an unusable payload, which a step could not fill in; it is never offered again."""
        if self.cache.tier is not None:
            self.cache.tier.discard(lost.move.digest)


class SideRules:
    """The rules of all side caches of a session, as one. Without any, rows use none and prompts are cut anywhere."""

    def __init__(self, rules: Iterable[SideRule[Any]] = ()) -> None:
        self._rules = tuple(rules)
        self._rows = tuple(rule.row for rule in self._rules)
        self._recede = tuple(rule.recede for rule in self._rules if type(rule).recede is not SideRule.recede)
        self._checked = tuple(rule.checked for rule in self._rules if type(rule).checked is not SideRule.checked)
        self.on_tree = bool(self._rules)  # nodes of the tree have something in addition to pages
        self.inside = all(rule.inside for rule in self._rules)
        self.drafts = all(rule.drafts for rule in self._rules)
        self.repeats = all(rule.repeats for rule in self._rules)
        self.ahead = any(rule.ahead for rule in self._rules)
        self.least = max((rule.least for rule in self._rules), default=1)

    def cut(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of its prompt the next row of a sequence computes; 0 if it has to wait."""
        length = min(budget, sequence.prefill_end - sequence.epoch.planned)
        for _ in self._rules:  # one more rule in each round has no further objection
            for rule in self._rules:
                length = rule.cut(sequence, length)
        return length

    def row(self, sequence: Sequence, length: int) -> tuple[SlotPair | PageRun, ...]:
        """Return the slots or pages of each side cache that the next row uses; it computes `length` tokens."""
        if len(self._rows) == 1:  # for each row of each step: half of the cost would be that of a list
            return (self._rows[0](sequence, length),)
        return tuple([row(sequence, length) for row in self._rows]) if self._rows else ()

    def draft_room(self, count: int) -> int:
        """Return for how many of `count` drafts there is room."""
        return min([count, *(room for rule in self._rules if (room := rule.draft_room()) is not None)])

    def drafts_of(self, sequence: Sequence, count: int) -> list[tuple[SlotPair | PageRun, ...]]:
        """Take the slots or pages for `count` rows of drafts, and return them."""
        for rule in self._rules:
            rule.cover(sequence, sequence.epoch.planned + count)
        positions = range(sequence.epoch.planned, sequence.epoch.planned + count)
        return [tuple([rule.draft(sequence, position) for rule in self._rules]) for position in positions]

    def checked(self, sequence: Sequence) -> None:
        """Continue after the last accepted draft of the step that was committed."""
        if sequence.sides:
            for checked in self._checked:
                checked(sequence)

    def admit(self, sequence: Sequence, match: PrefixMatch, *, fetched: bool) -> None:
        """Take the entries that an admitted sequence continues from."""
        sequence.sides = tuple([rule.admit(sequence, match, fetched=fetched) for rule in self._rules])

    def shared(self, owner: Sequence | None, pages: int) -> int:
        """Return how many of `pages`, which `owner` computes, another sequence will be able to use."""
        for rule in self._rules:
            pages = rule.shared(owner, pages)
        return pages

    def publish(self, sequence: Sequence, node: Node | None, last_step: int) -> None:
        """Give committed entries to the nodes, and give back entries no longer needed; see `SideRule.publish`."""
        if sequence.sides:
            for rule in self._rules:
                rule.publish(sequence, node, last_step)
            for recede in self._recede:
                recede(sequence)

    def recede(self, sequence: Sequence) -> None:
        """Give back entries that a sequence no longer needs, now that a row was committed."""
        if sequence.sides:
            for recede in self._recede:
                recede(sequence)

    def collect(self, oldest_step: int | None) -> None:
        """Release what no step in flight reads; `oldest_step` is the oldest one in flight."""
        for rule in self._rules:
            rule.collect(oldest_step)

    def release(self, sequence: Sequence) -> None:
        """Return a sequence's entries that no step in flight contains."""
        if sequence.sides:
            for rule in self._rules:
                rule.release(sequence)

    def continued(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Return the slots of the tree that a sequence continues, each with the number of its side cache."""
        if not sequence.sides:
            return []
        return [(rule.number, slot) for rule in self._rules for slot in rule.held(sequence)]

    def read_by(self, row: tuple[SlotPair | PageRun, ...]) -> list[tuple[int, int]]:
        """Return the slots that a row continues, if its sequence may hold them no longer, as `continued` does."""
        return [(rule.number, rule.reads(side)) for rule, side in zip(self._rules, row, strict=True)]

    def moves(self) -> Moves:
        """Take out the transfers of the step being planned; all of its rows are there."""
        out: tuple[PageMove, ...] = ()
        into: tuple[PageMove, ...] = ()
        for rule in self._rules:
            rule.planned()
            own = rule.cache.moves()
            out, into = out + own[0], into + own[1]
        return out, into

    def vacate(self) -> tuple[PageMove, ...]:
        """Return the entries that wait to be read out, because the slots are about to be freed."""
        return tuple(move for rule in self._rules for move in rule.cache.moves()[0])

    def done(self, arrived: tuple[PageMove, ...]) -> None:
        """End the transfers of a step that was committed or has failed."""
        for rule in self._rules:
            rule.cache.done([move for move in arrived if move.side == rule.number])

    def lose(self, moves: Iterable[PageMove]) -> None:
        """Take entries that could not be filled from their nodes."""
        for move in moves:
            self._rules[_number(move)].lose(move.page)

    def discard(self, lost: Iterable[LostPage]) -> None:
        """Drop unusable payloads, which a step could not fill in; they are never offered again."""
        for one in lost:
            self._rules[_number(one.move)].discard(one)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless slots are held as often as sequences say."""
        admitted = [sequence for sequence in sequences if sequence.sides]
        for rule in self._rules:
            rule.check_integrity(admitted)


class WholePrompts(SideRules):
    """Rules for models with tokens that see later ones: a prompt is computed in one step, or waits for one."""

    def cut(self, sequence: Sequence, budget: int) -> int:
        length = sequence.epoch.target - sequence.epoch.planned
        return length if length <= budget else 0


def _number(move: PageMove) -> int:
    assert move.side is not None, f"{move} is a page's"
    return move.side
