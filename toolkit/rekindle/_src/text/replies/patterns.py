"""Regular expressions of a stranger's file, matched in time that grows with the text alone.

`Pattern` reads a part of Python's syntax: characters, classes, groups, alternatives and repetition, greedy or lazy. It
follows all ways through an expression at once, one character at a time, so that there is nothing to backtrack.
Assertions other than `^` and `$`, references to groups, and flags are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_PATTERN = 1_024  # characters
MAX_PROGRAM = 256  # steps, after repetitions are written out; known templates have 130 at most
MAX_REPEAT = 256
_MAX_RANGES = 32  # of a class of characters, which is one step
_MAX_NESTED = 32
_SPECIAL = frozenset("()[]{}?*+|^$.\\")
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": lambda character: character.isalnum() or character == "_",
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}

Accepts = Callable[[str], bool]
Node = tuple[object, ...]


class PatternError(ValueError):
    """A pattern that is not read; the message says why."""


class PatternMatch(NamedTuple):
    """A match: its place, and the texts of named groups that took part."""

    start: int
    end: int
    groups: tuple[tuple[str, int, int], ...] = ()


class _Step(NamedTuple):
    """A step of a program: a character, a choice between two ways, a place to keep, a check, or the end."""

    kind: str  # "accept", "split", "jump", "save", "start", "end", "match"
    accepts: Accepts | None = None
    first: int = 0  # the next step of "split" and "jump", the slot of "save"
    second: int = 0


class _Thread(NamedTuple):
    step: int
    start: int
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern that was read."""

    text: str
    program: tuple[_Step, ...]
    names: tuple[str, ...]  # of groups, by their slots
    prefix: str  # with which each match begins

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Return a pattern. Raise `PatternError` for one that is too long, or not of the syntax that is read."""
        if len(text) > MAX_PATTERN:
            raise PatternError(f"has {len(text):,} characters, and {MAX_PATTERN:,} are read")
        parser = _PatternReader(text)
        node = parser.alternatives()
        if parser.at < len(text):
            raise PatternError("has a parenthesis too many")
        program = _Program()
        program.compile(node)
        program.steps.append(_Step("match"))
        return cls(text, tuple(program.steps), tuple(parser.names), _prefix(node))

    def finditer(self, text: str, budget: int, at: int = 0) -> Iterator[PatternMatch]:
        """Yield the matches of a text from a place on. Raise `PatternError` if they take more steps than `budget`."""
        while at <= len(text):
            search = PatternSearch(self, at)
            search.feed(text, 0, ended=True, limit=len(text) + 1, most=budget)
            budget -= search.steps
            match = search.match
            if match is None:
                return
            yield match
            at = match.end if match.end > match.start else match.end + 1


class PatternSearch:
    """A search for the next match in a text that is still coming.

    Places count from the beginning of the text. `match` is the match once it is decided; until then, `pending` is the
    earliest place at which one may begin.
    """

    def __init__(self, pattern: Pattern, at: int) -> None:
        self.pattern = pattern
        self.at = at
        self.steps = 0
        self.match: PatternMatch | None = None
        self.decided = False
        self._found: PatternMatch | None = None
        self._threads: list[_Thread] = []

    @property
    def pending(self) -> int:
        """The earliest place of an undecided match."""
        starts = [thread.start for thread in self._threads]
        if self._found is not None:
            starts.append(self._found.start)
        return min(starts, default=self.at)

    def feed(self, text: str, base: int, *, ended: bool, limit: int, most: int | None = None) -> None:
        """Go on with `text`, which begins at `base`. A match has at most `limit` characters.

        Raise `PatternError` as soon as the search has taken more steps than `most`.
        """
        prefix = self.pattern.prefix
        while not self.decided:
            index = self.at - base
            if index > len(text):  # after an empty match at the end
                self.decided = ended
                return
            if not self._threads and self._found is None and prefix:
                place = text.find(prefix, index)
                if place < 0:
                    self.at = (
                        max(self.at, base + max(len(text) - len(prefix) + 1, 0)) if not ended else base + len(text)
                    )
                    if ended:
                        self.decided = True
                    return
                self.at = base + place
                index = place
            if index >= len(text) and not ended:
                return
            if self._found is None:
                self._threads.append(_Thread(0, self.at, (-1,) * (2 * len(self.pattern.names))))
            at_end = index >= len(text)
            ready = self._closed(at_end)
            if most is not None and self.steps > most:
                raise PatternError("takes too many steps")
            if not at_end:
                self._threads = self._accepted(ready, text[index], limit)
                self.at += 1
            else:
                self._threads = []
            if self._found is not None and not self._threads:
                self.match, self.decided = self._found, True
            elif at_end:
                self.decided = True

    def _closed(self, at_end: bool) -> list[_Thread]:
        """Return the threads that wait for a character, in the order of their preference; note a match."""
        program, names = self.pattern.program, self.pattern.names
        seen: set[int] = set()
        ready: list[_Thread] = []
        for thread in self._threads:
            todo = [thread]
            while todo:
                step, start, slots = todo.pop()
                if step in seen:
                    continue
                seen.add(step)
                self.steps += 1
                kind, _, first, second = program[step]
                if kind == "accept":
                    ready.append(_Thread(step, start, slots))
                elif kind == "jump":
                    todo.append(_Thread(first, start, slots))
                elif kind == "split":
                    todo += [_Thread(second, start, slots), _Thread(first, start, slots)]
                elif kind == "save":
                    todo.append(_Thread(step + 1, start, (*slots[:first], self.at, *slots[first + 1 :])))
                elif kind == "start":
                    todo += [_Thread(step + 1, start, slots)] if self.at == 0 else []
                elif kind == "end":
                    todo += [_Thread(step + 1, start, slots)] if at_end else []
                else:
                    groups = tuple(
                        (name, slots[2 * index], slots[2 * index + 1])
                        for index, name in enumerate(names)
                        if slots[2 * index] >= 0 and slots[2 * index + 1] >= 0
                    )
                    self._found = PatternMatch(start, self.at, groups)
                    return ready  # the others are worse
        return ready

    def _accepted(self, ready: list[_Thread], character: str, limit: int) -> list[_Thread]:
        program = self.pattern.program
        threads = []
        for thread in ready:
            accepts = program[thread.step].accepts
            if accepts is not None and accepts(character) and self.at - thread.start < limit:
                threads.append(thread._replace(step=thread.step + 1))
        return threads


class _PatternReader:
    """Reads a pattern into a tree: ("char", accepts, text), ("all", …), ("any", …), ("many", node, …) and others."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.names: list[str] = []
        self._depth = 0

    def alternatives(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_NESTED:
            raise PatternError(f"is nested more than {_MAX_NESTED} levels deep")
        ways = [self._sequence()]
        while self._peek() == "|":
            self.at += 1
            ways.append(self._sequence())
        self._depth -= 1
        return ways[0] if len(ways) == 1 else ("any", *ways)

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (character := self._peek()) and character not in "|)":
            parts.append(self._repeated(self._atom()))
        return ("all", *parts)

    def _repeated(self, node: Node) -> Node:
        character = self._peek()
        if not character or character not in "*+?{":
            return node
        if character == "{":
            least, most = self._counts()
        else:
            self.at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        lazy = self._peek() == "?"
        self.at += lazy
        if (more := self._peek()) and more in "*+{":
            raise PatternError("has a repetition of a repetition, or a possessive one, which is not read")
        if node[0] in ("start", "end"):
            raise PatternError("repeats an assertion, which is not read")
        return ("many", node, least, most, lazy)

    def _counts(self) -> tuple[int, int | None]:
        end = self.text.find("}", self.at)
        least, comma, most = self.text[self.at + 1 : max(end, self.at + 1)].partition(",")
        if end < 0 or not all(part.isascii() and part.isdigit() and len(part) < 4 for part in (least, most) if part):
            raise PatternError("has a brace that counts nothing; write it as \\{")
        if not (least or most):
            raise PatternError("has a brace that counts nothing; write it as \\{")
        self.at = end + 1
        low = int(least or 0)
        high = (int(most) if most else None) if comma else low
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            raise PatternError(f"repeats something in a way that is not read; at most {MAX_REPEAT} times are")
        return low, high

    def _atom(self) -> Node:
        character = self.text[self.at]
        self.at += 1
        if character == ".":
            return ("char", lambda _: True, None)
        if character == "^":
            return ("start",)
        if character == "$":
            return ("end",)
        if character == "[":
            return ("char", self._class(), None)
        if character == "(":
            return self._group()
        if character == "\\":
            return self._escape()
        if character in "*+?{":
            raise PatternError(f"has a {character!r} with nothing before it")
        return ("char", character.__eq__, character)

    def _group(self) -> Node:
        slot = None
        if self._peek() == "?":
            if self.text.startswith("?:", self.at):
                self.at += 2
            elif self.text.startswith(("?P<", "?<"), self.at) and self.text[self.at : self.at + 3] not in (
                "?<=",
                "?<!",
            ):
                begin = self.text.index("<", self.at) + 1
                end = self.text.find(">", begin)
                name = self.text[begin : max(end, begin)]
                if not name.isidentifier() or name in self.names:
                    raise PatternError("has a group with a name that is not read")
                slot = len(self.names)
                self.names.append(name)
                self.at = end + 1
            else:
                raise PatternError(
                    f"has {self.text[self.at - 1 : self.at + 3]!r}, an assertion or a flag that is not read"
                )
        node = self.alternatives()
        if self._peek() != ")":
            raise PatternError("has a parenthesis that does not close")
        self.at += 1
        return node if slot is None else ("all", ("save", 2 * slot), node, ("save", 2 * slot + 1))

    def _escape(self) -> Node:
        character = self._peek()
        self.at += 1
        if character and character in "AZ":
            return ("start",) if character == "A" else ("end",)
        accepts, text = self._escaped(character)
        return ("char", accepts, text)

    def _escaped(self, character: str) -> tuple[Accepts, str | None]:
        if character.lower() in _CLASSES and character:
            accepts = _CLASSES[character.lower()]
            return (accepts, None) if character.islower() else ((lambda one: not accepts(one)), None)
        if character in _ESCAPES:
            return _ESCAPES[character].__eq__, _ESCAPES[character]
        if not character or character.isalnum():
            raise PatternError(f"has '\\{character}', which is not read")
        return character.__eq__, character

    def _class(self) -> Accepts:
        negated = self._peek() == "^"
        self.at += negated
        singles: set[str] = set()
        ranges: list[tuple[str, str]] = []
        others: list[Accepts] = []
        begin = self.at
        while (character := self._peek()) != "]" or self.at == begin:
            if not character:
                raise PatternError("has a bracket that does not close")
            self.at += 1
            text: str | None = character
            if character == "\\":
                character = self._peek()
                self.at += 1
                accepts, text = self._escaped(character)
                if text is None:
                    others.append(accepts)
                    continue
            assert text is not None, "a class has been taken"
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                last = self.text[self.at + 1]
                self.at += 2
                if last == "\\":
                    _, escaped = self._escaped(self._peek())
                    self.at += 1
                    last = escaped or ""
                if not last or last < text:
                    raise PatternError("has a range of characters that is not read")
                ranges.append((text, last))
            else:
                singles.add(text)
        self.at += 1
        if len(ranges) + len(others) > _MAX_RANGES:
            raise PatternError(f"has a class of more than {_MAX_RANGES} ranges")

        def accepts_one(one: str) -> bool:
            inside = one in singles or any(low <= one <= high for low, high in ranges)
            return (inside or any(other(one) for other in others)) != negated

        return accepts_one


class _Program:
    """Writes the steps of a tree, at most `MAX_PROGRAM`."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._nodes = 0

    def compile(self, node: Node) -> None:
        self._nodes += 1
        if max(len(self.steps), self._nodes // 4) > MAX_PROGRAM:  # a node may write no step
            raise PatternError(f"takes more than {MAX_PROGRAM:,} steps when its repetitions are written out")
        match node:
            case ("char", accepts, _):
                self.steps.append(_Step("accept", accepts))  # type: ignore[arg-type]
            case ("start",) | ("end",):
                self.steps.append(_Step(str(node[0])))
            case ("save", int(slot)):
                self.steps.append(_Step("save", None, slot))
            case ("all", *parts):
                for part in parts:
                    self.compile(part)  # type: ignore[arg-type]
            case ("any", *ways):
                self._compile_ways(ways)  # type: ignore[arg-type]
            case ("many", tuple(inner), int(least), most, lazy):
                self._compile_many(inner, least, most, bool(lazy))  # type: ignore[arg-type]

    def _compile_ways(self, ways: list[Node]) -> None:
        jumps = []
        for way in ways[:-1]:
            split = self._later()
            self.compile(way)
            jumps.append(self._later())
            self.steps[split] = _Step("split", None, split + 1, len(self.steps))
        self.compile(ways[-1])
        for jump in jumps:
            self.steps[jump] = _Step("jump", None, len(self.steps))

    def _compile_many(self, inner: Node, least: int, most: int | None, lazy: bool) -> None:
        for _ in range(least):
            self.compile(inner)
        splits = []
        for _ in range(1 if most is None else most - least):
            splits.append(self._later())
            self.compile(inner)
        if most is None:
            self.steps.append(_Step("jump", None, splits[0]))
        for at in splits:
            ways = (at + 1, len(self.steps))
            self.steps[at] = _Step("split", None, *(ways[::-1] if lazy else ways))

    def _later(self) -> int:
        """Return the place of a step that is written once it is known where it leads."""
        self.steps.append(_Step("split"))
        return len(self.steps) - 1


def _prefix(node: Node) -> str:
    """Return the text with which every match begins."""
    if node[0] == "char":
        return str(node[2]) if node[2] is not None else ""
    if node[0] != "all":
        return ""
    text = ""
    for part in node[1:]:
        assert isinstance(part, tuple), "a node is a tuple"
        if part[0] == "save":
            continue
        inner = _prefix(part)
        text += inner
        if not (part[0] == "char" and inner):
            break
    return text
