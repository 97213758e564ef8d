"""Expressions over names of modules, without backtracking: the part of regular expressions that trainers write.

A name has few positions, so a set of them is an int with a bit for each. Matching goes backwards: every part of an
expression returns the positions where it can start, given those where it may end. Nothing is tried twice: whatever the
expression, its cost is at most its length, counts written out, times that of the name. What is accepted matches exactly
what `re` matches; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

MAX_LENGTH = 4096  # characters; those that trainers write have a few hundred
MAX_STEPS = 1 << 22  # for all expressions and names of one adapter: seconds; 560 keys over as many modules take 273,700
_MAX_DEPTH, _MAX_REPEATS = 16, 255
_DIGITS = "0123456789"


class UnsupportedExpression(ValueError):
    """An expression that is not matched, and why."""


class Budget:
    """The steps that all expressions of one adapter may still take."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise UnsupportedExpression("the expressions take too many steps on the names of this model")


class _Name:
    """A name, and where its characters are: bit i of a set stands for the position before character i."""

    def __init__(self, text: str, budget: Budget) -> None:
        self.text, self.budget = text, budget
        self.end = 1 << len(text)
        self.anywhere = 2 * self.end - 1
        self._of_character: dict[str, int] = {}
        for index, character in enumerate(text):
            self._of_character[character] = self._of_character.get(character, 0) | 1 << index
        self._of_literal: dict[str, int] = {}

    def literal(self, text: str) -> int:
        """Return the positions where a text starts."""
        places = self._of_literal.get(text)
        if places is None:
            places, at = 0, self.text.find(text)
            while at >= 0:
                places |= 1 << at
                at = self.text.find(text, at + 1)
            self._of_literal[text] = places
        return places

    def characters(self, accepts: Callable[[str], bool]) -> int:
        """Return the positions before characters of a kind."""
        return sum(places for character, places in self._of_character.items() if accepts(character))


class _Pattern(Protocol):
    def starts(self, name: _Name, ends: int) -> int:
        """Return the positions where it can start if it may end at those of `ends`."""
        ...


class _Literal:
    def __init__(self, text: str) -> None:
        self.text = text

    def starts(self, name: _Name, ends: int) -> int:
        name.budget.spend()
        return name.literal(self.text) & (ends >> len(self.text))


class _Character:
    """One character of a kind."""

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self.accepts = accepts

    def starts(self, name: _Name, ends: int) -> int:
        name.budget.spend()
        return name.characters(self.accepts) & (ends >> 1)


class _Sequence:
    def __init__(self, parts: Sequence[_Pattern]) -> None:
        self.parts = parts

    def starts(self, name: _Name, ends: int) -> int:
        for part in reversed(self.parts):
            if not ends:
                break
            ends = part.starts(name, ends)
        return ends


class _Choice:
    def __init__(self, parts: Sequence[_Pattern]) -> None:
        self.parts = parts

    def starts(self, name: _Name, ends: int) -> int:
        name.budget.spend()
        places = 0
        for part in self.parts:
            places |= part.starts(name, ends)
        return places


class _Repeat:
    """A part, from `least` to `most` times; without `most`, any number of times from `least` on."""

    def __init__(self, part: _Pattern, least: int, most: int | None) -> None:
        self.part, self.least, self.most = part, least, most

    def starts(self, name: _Name, ends: int) -> int:
        name.budget.spend()
        if self.most is not None:
            places = ends
            for _ in range(self.most - self.least):
                ends = self.part.starts(name, ends)
                places |= ends
        elif isinstance(self.part, _Character):
            places = _filled(ends, name.characters(self.part.accepts), len(name.text))
        else:
            places = ends
            while ends:
                ends = self.part.starts(name, ends) & ~places
                places |= ends
        for _ in range(self.least):
            places = self.part.starts(name, places)
        return places


def _filled(places: int, through: int, length: int) -> int:
    """Return the places, and those before them that lead there through characters at `through`."""
    step = 1
    while step <= length:
        places |= through & (places >> step)
        through &= through >> step
        step *= 2
    return places


class _Where:
    """Matches the empty text at positions of a kind, such as the end."""

    def __init__(self, places: Callable[[_Name], int]) -> None:
        self._places = places

    def starts(self, name: _Name, ends: int) -> int:
        name.budget.spend()
        return self._places(name) & ends


class _Lookahead:
    """Matches the empty text where a part follows, or, if negative, where it does not."""

    def __init__(self, part: _Pattern, *, negative: bool) -> None:
        self._part, self._negative = part, negative

    def starts(self, name: _Name, ends: int) -> int:
        follows = self._part.starts(name, name.anywhere)
        return ends & ~follows if self._negative else ends & follows


def _bounds_of_words(name: _Name) -> int:
    words = name.characters(_CLASSES["w"])
    return words ^ (words << 1)


def _ends(name: _Name) -> int:
    return name.end | (name.end >> 1 if name.text.endswith("\n") else 0)


_CLASSES: Mapping[str, Callable[[str], bool]] = {
    "d": str.isdecimal, "D": lambda c: not c.isdecimal(),
    "w": lambda c: c.isalnum() or c == "_", "W": lambda c: not (c.isalnum() or c == "_"),
    "s": str.isspace, "S": lambda c: not c.isspace(),
}  # fmt: skip
_PLACES: Mapping[str, Callable[[_Name], int]] = {
    "A": lambda name: 1, "Z": lambda name: name.end, "b": _bounds_of_words,
    "B": lambda name: name.anywhere & ~_bounds_of_words(name),
}  # fmt: skip


def _but_line_ends(character: str) -> bool:
    return character != "\n"


class Expression:
    """An expression over names. Raise UnsupportedExpression for one that is not matched here."""

    def __init__(self, text: str, budget: Budget) -> None:
        if len(text) > MAX_LENGTH:
            raise UnsupportedExpression(f"it has {len(text):,} characters, and {MAX_LENGTH:,} are read")
        self._budget = budget
        self._part = _Parser(text).whole()
        last = self._part.parts[-1] if isinstance(self._part, _Sequence) and self._part.parts else self._part
        self._tail = last.text if isinstance(last, _Literal) else ""  # rules out most names at once

    def matches(self, text: str) -> bool:
        """True if it matches a whole name, as `re.fullmatch` does."""
        return self._starts(text) & 1 != 0

    def matches_end(self, text: str) -> bool:
        """True if it matches a whole name, or what follows one of its dots."""
        starts = self._starts(text)
        return starts & 1 != 0 or any(starts >> at + 1 & 1 for at, letter in enumerate(text) if letter == ".")

    def _starts(self, text: str) -> int:
        self._budget.spend()
        if not text.endswith(self._tail):
            return 0
        name = _Name(text, self._budget)
        return self._part.starts(name, name.end)


class _Parser:
    """Reads an expression, character by character."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def whole(self) -> _Pattern:
        part = self._choice()
        if self._at < len(self._text):
            raise self._refused("a ')' that closes nothing")
        return part

    def _refused(self, what: str) -> UnsupportedExpression:
        return UnsupportedExpression(f"{what} is not supported (at character {self._at + 1})")

    def _next(self, text: str) -> bool:
        """Pass over a text, if it is next."""
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _choice(self) -> _Pattern:
        parts = [self._sequence()]
        while self._next("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Choice(parts)

    def _sequence(self) -> _Pattern:
        parts: list[_Pattern] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._repeated(self._single())
            if isinstance(part, _Literal) and parts and isinstance(parts[-1], _Literal):
                part = _Literal(parts.pop().text + part.text)  # type: ignore[attr-defined]
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Sequence(parts)

    def _single(self) -> _Pattern:
        letter = self._text[self._at]
        if letter == "(":
            return self._group()
        self._at += 1
        match letter:
            case ".":
                return _Character(_but_line_ends)
            case "^":
                return _Where(_PLACES["A"])
            case "$":
                return _Where(_ends)
            case "[":
                return _Character(self._class())
            case "\\":
                letter = self._escaped()
                if letter in _CLASSES:
                    return _Character(_CLASSES[letter])
                if letter in _PLACES:
                    return _Where(_PLACES[letter])
                return _Literal(self._plain(letter))
        if letter in "*+?{":
            self._at -= 1
            raise self._refused(f"a {letter!r} that repeats nothing")
        return _Literal(letter)

    def _group(self) -> _Pattern:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._refused(f"groups in more than {_MAX_DEPTH} groups")
        if self._next("(?!"):
            part: _Pattern = _Lookahead(self._choice(), negative=True)
        elif self._next("(?="):
            part = _Lookahead(self._choice(), negative=False)
        elif self._next("(?:"):
            part = self._choice()
        elif self._text.startswith("(?", self._at):
            raise self._refused(f"{self._text[self._at : self._at + 3]!r}")
        else:
            self._at += 1
            part = self._choice()
        if not self._next(")"):
            raise self._refused("a group without its ')'")
        self._depth -= 1
        return part

    def _repeated(self, part: _Pattern) -> _Pattern:
        start = self._at
        if self._next("*"):
            least, most = 0, None
        elif self._next("+"):
            least, most = 1, None
        elif self._next("?"):
            least, most = 0, 1
        elif self._next("{"):
            least, most = self._counts()
        else:
            return part
        self._next("?")  # a lazy one matches the same names
        if self._text[self._at : self._at + 1] in ("*", "+", "?", "{"):
            raise self._refused("a repeat of a repeat")
        if isinstance(part, _Literal) and len(part.text) == 1:
            part = _Character(part.text.__eq__)
        self._at, after = start, self._at  # where errors point
        if isinstance(part, _Where | _Lookahead):
            raise self._refused("a repeat of an anchor or a look-ahead")
        if (least, most) != (0, 1) and not isinstance(part, _Character) and _repeats_groups(part):
            raise self._refused("a repeat of a group with a repeated group or a look-ahead in it")
        self._at = after
        return _Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None]:
        least = self._number()
        most = least
        if self._next(","):
            most = self._number()
        if not self._next("}") or (least is None and most is None):
            raise self._refused("a '{' that is no repeat (write '\\{')")
        least = least or 0
        if most is not None and not least <= most:
            raise self._refused("a repeat whose first number is above its second")
        if max(least, most or 0) > _MAX_REPEATS:
            raise self._refused(f"a repeat of more than {_MAX_REPEATS}")
        return least, most

    def _number(self) -> int | None:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in _DIGITS:
            self._at += 1
        digits = self._text[start : self._at]
        return min(int(digits[:9]), _MAX_REPEATS + 1) if digits else None

    def _escaped(self) -> str:
        letter = self._text[self._at : self._at + 1]
        if not letter:
            raise self._refused("a '\\' at the end")
        self._at += 1
        return letter

    def _plain(self, letter: str) -> str:
        if letter.isalnum() or not letter.isascii():
            raise self._refused(f"'\\{letter}'")
        return letter

    def _class(self) -> Callable[[str], bool]:
        excluded = self._next("^")
        if self._text.startswith("]", self._at):
            raise self._refused("an empty class (write '\\]' for a bracket)")
        tests: list[Callable[[str], bool]] = []
        letters: set[str] = set()
        while not self._next("]"):
            first, test = self._of_class()
            if test is not None:
                tests.append(test)
            elif self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last, test = self._of_class()
                if test is not None or last < first:
                    raise self._refused("a range of a class that does not ascend")
                tests.append(lambda letter, first=first, last=last: first <= letter <= last)  # type: ignore[misc]
            else:
                letters.add(first)
        return lambda letter: (letter in letters or any(test(letter) for test in tests)) != excluded

    def _of_class(self) -> tuple[str, Callable[[str], bool] | None]:
        """Read a character of a class, or an escaped class."""
        letter = self._text[self._at : self._at + 1]
        if not letter:
            raise self._refused("a class without its ']'")
        self._at += 1
        if letter != "\\":
            return letter, None
        letter = self._escaped()
        return (letter, _CLASSES[letter]) if letter in _CLASSES else (self._plain(letter), None)


def _repeats_groups(part: _Pattern) -> bool:
    """True if a part has the repeat of a group, or a look-ahead, in it: repeats of it would not be linear."""
    if isinstance(part, _Sequence | _Choice):
        return any(map(_repeats_groups, part.parts))
    if isinstance(part, _Repeat):
        single = isinstance(part.part, _Character) or (part.least, part.most) == (0, 1)
        return not single or _repeats_groups(part.part)
    return isinstance(part, _Lookahead)
