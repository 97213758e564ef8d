"""Tests whether a pattern of Python's `re` may take more than linear time, by its parse tree, and finds texts that show
it.

`re` tries one way through a pattern after another. Their number grows faster than the text in two cases, which are
those of ambiguous automata (Weideman and others, "Analyzing matching time behavior of backtracking regular expression
matchers", 2016). Each character of the pattern is a state here:

- a state can be left and reached again in two ways that read the same text, as in `(a+)+`: exponential;
- of two states, each can be reached again, and the second from the first, all reading the same text, as in `a*a*`:
  quadratic. A search begins at each place of a text, as if an `.*` stood before the pattern: `x.*y` is quadratic.

Neither costs anything where the pattern has matched already when it gets there, or where a possessive repeat (`*+`) or
a class that excludes what comes next leaves one way. Groups that are atomic, counted repeats and assertions are taken
for less than they are, so a pattern may be refused that is linear. None that is not passes, but for those that the
code around it repeats: `test_doubling.py` looks for these.
"""

from __future__ import annotations

import itertools
import re
import re._constants as op
import re._parser as parser
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

# A few of each kind of character. Those that a pattern names are added.
_SAMPLES = [*map(chr, range(128)), *"\x85\xa0\u00e9\u00df\u0130\u0663\u2028\u3000\u4e2d\U0001f600"]
_COPIES = 8  # a repeat of at most so many is written out
_FIXED = 64


class _Part(NamedTuple):
    """A part of a pattern: its beginning and end, and the states that may follow each way for it to be empty.

    States come with the characters that may be read next, as bits; `_Automaton.sure` means that the pattern goes on
    whatever comes next, the end included.
    """

    first: list[tuple[int, int]]
    last: list[tuple[int, int]]
    empty: list[int]


class Ambiguity(NamedTuple):
    """A text that can be read in several ways as it is repeated."""

    kind: str  # "exponential" or "quadratic"
    states: tuple[str, ...]  # of the pattern, as classes of characters

    def __str__(self) -> str:
        return f"{self.kind}: the same text repeats {' and '.join(self.states)}"


def ambiguity(pattern: str | bytes, flags: int = 0, *, how: str = "search") -> Ambiguity | None:
    """Return why a pattern may take more than linear time; None if it can't. `how` is the method: search, match, …"""
    return _Automaton(pattern, flags, how).ambiguity()


class _Automaton:
    def __init__(self, pattern: str | bytes, flags: int, how: str) -> None:
        tree = parser.parse(pattern, flags)
        self.flags = tree.state.flags
        self._how = how
        self._bytes = isinstance(pattern, bytes)
        self._chars = [*map(chr, range(256))] if self._bytes else _SAMPLES + _named(tree)
        self.sure = 1 << len(self._chars)
        self._all = 2 * self.sure - 1
        self._sets: list[int] = []
        self._follow: list[list[tuple[int, int]]] = []
        self.referring: str | None = None
        whole = self._sequence(tree.data)
        if how not in ("match", "fullmatch"):
            whole = self._then(self._before(*tree.data[0]) if tree.data else self._sequence([]), whole)
        self._safe = set() if how == "fullmatch" else {state for state, after in whole.last if after & self.sure}

    # From the tree to states.

    def _before(self, kind: Any, value: Any) -> _Part:
        """The text before a match that is searched for, by the pattern's first item: an anchor, or a lookbehind."""
        chars = None
        if kind is op.AT and value in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            if value is op.AT_BEGINNING_STRING or not self.flags & re.M:
                return self._sequence([])
            chars = 1 << self._chars.index("\n")
        elif kind in (op.ASSERT, op.ASSERT_NOT) and value[0] < 0 and len(value[1]) == 1:
            chars = self._class(*value[1][0])
            if chars is not None and kind is op.ASSERT_NOT:
                chars = self._all & ~chars
        any_text = self._loop(self._state(self._all), [self._all])
        return any_text if chars is None else self._then(any_text, self._state(chars))._replace(empty=[self._all])

    def _state(self, chars: int) -> _Part:
        self._sets.append(chars & ~self.sure)
        self._follow.append([])
        state = len(self._sets) - 1
        return _Part([(state, self._all)], [(state, self._all)], [])

    def _join(self, last: Iterable[tuple[int, int]], first: Iterable[tuple[int, int]]) -> None:
        for (state, after), (following, before) in product(last, first):
            self._follow[state].append((following, after & before))

    def _then(self, left: _Part, right: _Part) -> _Part:
        self._join(left.last, right.first)
        first = left.first + [(state, before & empty) for empty in left.empty for state, before in right.first]
        last = right.last + [(state, after & empty) for empty in right.empty for state, after in left.last]
        empties = [one & other for one, other in product(left.empty, right.empty)]
        return _Part(first, last, empties[:2])  # two are as ambiguous as any

    def _either(self, parts: list[_Part]) -> _Part:
        first, last, empties = (list(itertools.chain(*kinds)) for kinds in zip(*parts, strict=True))
        return _Part(first, last, empties[:2])

    def _loop(self, part: _Part, empty: list[int]) -> _Part:
        self._join(part.last, part.first)
        return _Part(part.first, part.last, empty)

    def _sequence(self, items: Iterable[tuple[Any, Any]]) -> _Part:
        whole = _Part([], [], [self._all])
        for kind, value in items:
            whole = self._then(whole, self._item(kind, value))
        return whole

    def _item(self, kind: Any, value: Any) -> _Part:
        if (chars := self._class(kind, value)) is not None:
            return self._state(chars)
        unsure = self._all & ~self.sure
        if kind is op.BRANCH:
            return self._either([self._sequence(branch) for branch in value[1]])
        if kind is op.SUBPATTERN:
            return self._sequence(value[3])
        if kind is op.ATOMIC_GROUP:
            data = list(value)
            if len(data) == 1 and data[0][0] is op.MAX_REPEAT:
                return self._item(op.POSSESSIVE_REPEAT, data[0][1])
            return self._sequence(data)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            return self._repeat(kind, *value)
        if kind in (op.ASSERT, op.ASSERT_NOT):
            direction, body = value
            if direction < 0:  # of fixed length
                return _Part([], [], [unsure])
            chars = self._class(*body[0]) if len(body) == 1 else None
            if chars is not None:
                return _Part([], [], [chars & unsure if kind is op.ASSERT else unsure & ~chars])
            return _Part(self._sequence(body).first, [], [unsure])  # it is read, and then the text again
        if kind is op.AT:
            if value in (op.AT_END, op.AT_END_STRING):
                return _Part([], [], [0 if value is op.AT_END_STRING else 1 << self._chars.index("\n")])
            return _Part([], [], [unsure])
        if kind is op.FAILURE:  # what Python 3.13 reads `(?!)` as
            return _Part([], [], [unsure])
        if kind in (op.GROUPREF, op.GROUPREF_EXISTS):
            self.referring = "a reference to a group"
            return self._loop(self._state(self._all), [self._all])
        raise NotImplementedError(f"{kind} in a pattern")

    def _repeat(self, kind: Any, least: int, most: int, body: Any) -> _Part:
        chars = self._class(*body[0]) if len(body) == 1 else None
        endless = most is op.MAXREPEAT or (most > _COPIES and not least == most <= _FIXED)
        whole = _Part([], [], [self._all])
        for _ in range(min(least, _FIXED)):
            whole = self._then(whole, self._sequence(body))
        if not endless:
            for _ in range(int(most) - least):  # one inside of the other: the next only after the one before
                whole = self._then(whole, _Part(*self._sequence(body)[:2], [self._all]))
            return whole
        empty = self._all if kind is not op.POSSESSIVE_REPEAT or chars is None else self._all & ~chars
        loop = self._loop(self._sequence(body), [empty])
        if empty != self._all:  # it ends where its class does
            loop = loop._replace(last=[(state, after & empty) for state, after in loop.last])
        return self._then(whole, loop)

    def _class(self, kind: Any, value: Any) -> int | None:
        """Return the characters that one item matches, as bits; None if it is no single character."""
        if kind is op.ANY:
            return sum(1 << i for i, c in enumerate(self._chars) if c != "\n" or self.flags & re.S)
        if kind in (op.LITERAL, op.NOT_LITERAL):
            value = [(op.LITERAL, value)] if kind is op.LITERAL else [(op.NEGATE, None), (op.LITERAL, value)]
        elif kind is op.SUBPATTERN and len(value[3]) == 1:
            return self._class(*value[3][0])
        elif kind is not op.IN:
            return None
        negated = value[0][0] is op.NEGATE
        items = value[1:] if negated else value
        chars = 0
        for index, char in enumerate(self._chars):
            cases = {char, char.lower(), char.upper()} if self.flags & re.I else {char}
            if any(self._matches(one, item) for one in cases if len(one) == 1 for item in items) != negated:
                chars |= 1 << index
        return chars

    def _matches(self, char: str, item: tuple[Any, Any]) -> bool:
        kind, value = item
        if kind is op.LITERAL:
            return ord(char) == value
        if kind is op.RANGE:
            return value[0] <= ord(char) <= value[1]
        assert kind is op.CATEGORY, kind
        plain = not (self._bytes or self.flags & re.A) or char.isascii()
        name = str(value).removeprefix("CATEGORY_")
        word = name.removeprefix("NOT_")
        test = {"DIGIT": char.isdecimal(), "SPACE": char.isspace(), "WORD": char.isalnum() or char == "_"}
        return (plain and test[word]) != (word != name)

    # From states to what is ambiguous.

    def ambiguity(self) -> Ambiguity | None:
        if self.referring is not None:
            return Ambiguity("unknown", (self.referring,))
        steps = self._steps()
        reach = [_reachable(state, steps) for state in range(len(steps))]
        loops = [state for state in range(len(steps)) if state in reach[state]]
        component = {state: {other for other in reach[state] if state in reach[other]} for state in loops}
        for state in loops:
            if state not in self._safe and _two_ways(state, component[state], steps):
                return Ambiguity("exponential", (self._name(state),))
        for first, second in product(loops, loops):
            if first != second and second not in self._safe and second in reach[first]:
                between = reach[first] & {s for s in range(len(steps)) if second in reach[s]} | {first, second}
                if _repeats(first, second, component[first], component[second], between, steps):
                    return Ambiguity("quadratic", (self._name(first), self._name(second)))
        return None

    def _steps(self) -> list[dict[int, list[int]]]:
        """The states that follow each state, by kind of character."""
        masks = sorted({*self._sets, *(mask for following in self._follow for _, mask in following)})
        kinds: dict[tuple[bool, ...], int] = {}
        for index in range(len(self._chars)):
            kinds.setdefault(tuple(bool(mask >> index & 1) for mask in masks), index)
        return [
            {
                index: [state for state, mask in following if (mask & self._sets[state]) >> index & 1]
                for index in kinds.values()
            }
            for following in self._follow
        ]

    def _name(self, state: int) -> str:
        chars = [char for index, char in enumerate(self._chars) if self._sets[state] >> index & 1]
        shown = repr("".join(chars[:12]))
        return "any character" if len(chars) == len(self._chars) else shown + ("…" if len(chars) > 12 else "")


def _named(tree: Any) -> list[str]:
    """The characters beyond ASCII that a pattern names."""
    numbers = re.findall(r"(?:LITERAL|RANGE), \(?(\d+)(?:, (\d+))?", repr(tree.data))
    return sorted(
        {chr(int(number)) for pair in numbers for number in pair if number and int(number) > 127} - {*_SAMPLES}
    )


def _reachable(state: int, steps: list[dict[int, list[int]]]) -> set[int]:
    seen: set[int] = set()
    pending = [state]
    while pending:
        for following in steps[pending.pop()].values():
            for one in following:
                if one not in seen:
                    seen.add(one)
                    pending.append(one)
    return seen


def _two_ways(state: int, inside: set[int], steps: list[dict[int, list[int]]]) -> bool:
    """True if two different ways from a state to itself read the same text."""
    start = (state, state, False)
    seen, pending = {start}, [start]
    while pending:
        left, right, apart = pending.pop()
        for index, following in steps[left].items():
            for i, one in enumerate(following):
                for j, other in enumerate(steps[right][index]):
                    if one not in inside or other not in inside:
                        continue
                    differs = apart or one != other or (left == right and i != j)
                    if differs and one == other == state:
                        return True
                    if (one, other, differs) not in seen:
                        seen.add((one, other, differs))
                        pending.append((one, other, differs))
    return False


def _repeats(
    first: int, second: int, around_first: set[int], around_second: set[int], between: set[int],
    steps: list[dict[int, list[int]]],
) -> bool:  # fmt: skip
    """True if one text leads from the first state to itself, from it to the second, and from the second to itself."""
    start, goal = (first, first, second), (first, second, second)
    seen, pending = {start}, [start]
    while pending:
        a, b, c = pending.pop()
        for index in steps[a]:
            for triple in product(steps[a][index], steps[b][index], steps[c][index]):
                if triple == goal:
                    return True
                x, y, z = triple
                if x in around_first and y in between and z in around_second and triple not in seen:
                    seen.add(triple)
                    pending.append(triple)
    return False
