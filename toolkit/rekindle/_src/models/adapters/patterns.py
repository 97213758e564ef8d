"""Patterns of names of modules, matched without backtracking: the parts that an expression is parsed into.

A name has few positions, so a set of them is an int with a bit for each. Matching goes backwards: every pattern returns
the positions where it can start, given those where it may end. Nothing is tried twice, and every operation is taken off
the budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from rekindle._src.models.adapters.budget import Budget


class ModuleName:
    """A name, and where its characters are: bit i of a set stands for the position before character i."""

    def __init__(self, text: str, budget: Budget) -> None:
        budget.spend(1 + len(text))
        self.text, self.budget = text, budget
        self.end = 1 << len(text)
        self.anywhere = 2 * self.end - 1
        self._of_letter: dict[str, int] = {}
        for index, letter in enumerate(text):
            self._of_letter[letter] = self._of_letter.get(letter, 0) | 1 << index
        self._of_kind: dict[Letters, int] = {}

    @property
    def after_dots(self) -> int:
        """The positions after its dots."""
        return self.places(".") << 1

    def places(self, letter: str) -> int:
        """Return the positions before a letter."""
        return self._of_letter.get(letter, 0)

    def of_kind(self, letters: Letters) -> int:
        """Return the positions before letters of a kind. Each letter of the name is tested once."""
        places = self._of_kind.get(letters)
        if places is None:
            self.budget.spend(len(self._of_letter) * letters.tests)
            places = sum(places for letter, places in self._of_letter.items() if letters.accepts(letter))
            self._of_kind[letters] = places
        return places


class ModuleNames:
    """The names that the expressions of one adapter are matched with, one after the other."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._latest: ModuleName | None = None  # expressions come in turn with the same name

    def of(self, text: str) -> ModuleName:
        """Return a name of known letters."""
        if self._latest is None or self._latest.text != text:
            self._latest = ModuleName(text, self.budget)
        return self._latest


class Letters:
    """A kind of letters, such as `[a-z\\d_]`. A letter is looked up in its sorted ranges."""

    def __init__(
        self,
        singles: Iterable[str] = (),
        ranges: Iterable[tuple[str, str]] = (),
        kinds: Iterable[Callable[[str], bool]] = (),
        *,
        excluded: bool = False,
    ) -> None:
        """The kind has single letters, ranges [first, last], and what one of `kinds` accepts; or all but these."""
        self._singles, self._kinds, self._excluded = frozenset(singles), tuple(kinds), excluded
        self._firsts: list[str] = []
        self._lasts: list[str] = []
        for first, last in sorted(ranges):
            if self._lasts and first <= self._lasts[-1]:
                self._lasts[-1] = max(last, self._lasts[-1])
            else:
                self._firsts.append(first)
                self._lasts.append(last)

    @property
    def tests(self) -> int:
        """The most tests that a letter takes."""
        return 1 + len(self._kinds) + len(self._firsts).bit_length()

    def accepts(self, letter: str) -> bool:
        """True if a letter is of the kind."""
        return (letter in self._singles or self._in_ranges(letter) or self._is_one(letter)) != self._excluded

    def _in_ranges(self, letter: str) -> bool:
        at = bisect_right(self._firsts, letter)
        return at > 0 and letter <= self._lasts[at - 1]

    def _is_one(self, letter: str) -> bool:
        return any(kind(letter) for kind in self._kinds)


class NamePattern(Protocol):
    """A part of an expression."""

    def starts(self, name: ModuleName, ends: int) -> int:
        """Return the positions where it can start if it may end at `ends`."""
        ...


class Literal:
    """A text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def starts(self, name: ModuleName, ends: int) -> int:
        name.budget.spend()
        for letter in reversed(self.text):
            ends = ends >> 1 & name.places(letter)
            if not ends:
                break
            name.budget.spend()
        return ends


class Character:
    """One letter of a kind."""

    def __init__(self, letters: Letters) -> None:
        self.letters = letters

    def starts(self, name: ModuleName, ends: int) -> int:
        name.budget.spend()
        return name.of_kind(self.letters) & (ends >> 1)


class PatternSequence:
    """Parts, one after the other."""

    def __init__(self, parts: Sequence[NamePattern]) -> None:
        self.parts = parts

    def starts(self, name: ModuleName, ends: int) -> int:
        name.budget.spend()
        for part in reversed(self.parts):
            if not ends:
                break
            ends = part.starts(name, ends)
        return ends


class PatternChoice:
    """One of several parts."""

    def __init__(self, parts: Sequence[NamePattern]) -> None:
        self.parts = parts

    def starts(self, name: ModuleName, ends: int) -> int:
        places = 0
        for part in self.parts:
            name.budget.spend()
            places |= part.starts(name, ends)
        return places


class Repeat:
    """A part, from `least` to `most` times; without `most`, any number of times from `least` on."""

    def __init__(self, part: NamePattern, least: int, most: int | None) -> None:
        self.part, self.least, self.most = part, least, most

    def starts(self, name: ModuleName, ends: int) -> int:
        name.budget.spend()
        places = ends
        if self.most is not None:
            for _ in range(self.most - self.least):
                ends = self.part.starts(name, ends)
                if not ends:
                    break
                places |= ends
        elif isinstance(self.part, Character):
            places = _filled(ends, self.part.letters, name)
        else:
            while ends:
                ends = self.part.starts(name, ends) & ~places
                places |= ends
        for _ in range(self.least):
            if not places:
                break
            places = self.part.starts(name, places)
        return places


def _filled(places: int, letters: Letters, name: ModuleName) -> int:
    """Return the places, and those before them that lead there through letters of a kind."""
    through, length, step = name.of_kind(letters), len(name.text), 1
    name.budget.spend(2 * length.bit_length())
    while step <= length:
        places |= through & (places >> step)
        through &= through >> step
        step *= 2
    return places


class Where:
    """Matches the empty text at positions of a kind, such as the end."""

    def __init__(self, places: Callable[[ModuleName], int]) -> None:
        self._places = places

    def starts(self, name: ModuleName, ends: int) -> int:
        name.budget.spend()
        return self._places(name) & ends


class Lookahead:
    """Matches the empty text where a part follows, or, if negative, where it does not."""

    def __init__(self, part: NamePattern, *, negative: bool) -> None:
        self._part, self._negative = part, negative

    def starts(self, name: ModuleName, ends: int) -> int:
        name.budget.spend()
        follows = self._part.starts(name, name.anywhere)
        return ends & ~follows if self._negative else ends & follows


def repeats_groups(part: NamePattern) -> bool:
    """True if a part has the repeat of a group, or a look-ahead, in it: repeats of it would not be linear."""
    if isinstance(part, PatternSequence | PatternChoice):
        return any(map(repeats_groups, part.parts))
    if isinstance(part, Repeat):
        single = isinstance(part.part, Character) or (part.least, part.most) == (0, 1)
        return not single or repeats_groups(part.part)
    return isinstance(part, Lookahead)


def is_word(letter: str) -> bool:
    """True for letters of `\\w`."""
    return letter.isalnum() or letter == "_"


KINDS: Mapping[str, Callable[[str], bool]] = {
    "d": str.isdecimal, "D": lambda letter: not letter.isdecimal(),
    "w": is_word, "W": lambda letter: not is_word(letter),
    "s": str.isspace, "S": lambda letter: not letter.isspace(),
}  # fmt: skip
ESCAPED: Mapping[str, Character] = {letter: Character(Letters(kinds=[kind])) for letter, kind in KINDS.items()}
ANY_LETTER = Character(Letters("\n", excluded=True))


def _bounds_of_words(name: ModuleName) -> int:
    words = name.of_kind(ESCAPED["w"].letters)
    return words ^ (words << 1)


def _ends(name: ModuleName) -> int:
    return name.end | (name.end >> 1 if name.text.endswith("\n") else 0)


PLACES: Mapping[str, Where] = {
    "A": Where(lambda name: 1), "Z": Where(lambda name: name.end), "$": Where(_ends),
    "b": Where(_bounds_of_words), "B": Where(lambda name: name.anywhere & ~_bounds_of_words(name)),
}  # fmt: skip
