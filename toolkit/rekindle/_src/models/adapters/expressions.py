"""Expressions over names of modules: the part of regular expressions that trainers write.

An expression that is accepted matches exactly the names that `re` matches; anything else is refused. A match, by
`patterns`, costs at most the length of the expression, counts written out, times that of the name.
"""

from __future__ import annotations

from rekindle._src.models.adapters.patterns import (
    ANY_LETTER,
    ESCAPED,
    KINDS,
    PLACES,
    Character,
    Letters,
    Literal,
    Lookahead,
    ModuleNames,
    NamePattern,
    PatternChoice,
    PatternSequence,
    Repeat,
    Where,
    repeats_groups,
)

MAX_LENGTH = 4096  # characters; expressions of trainers have a few hundred
_MAX_DEPTH, _MAX_REPEATS = 16, 255
_DIGITS = "0123456789"


class UnsupportedExpression(ValueError):
    """An expression that is not matched, and why."""


class Expression:
    """An expression over names. Raise UnsupportedExpression for one that is not matched here."""

    def __init__(self, text: str, names: ModuleNames) -> None:
        if len(text) > MAX_LENGTH:
            raise UnsupportedExpression(f"it has {len(text):,} characters, and {MAX_LENGTH:,} are read")
        names.budget.spend(1 + 2 * len(text))  # a character takes longer to read than to match
        self._names = names
        self._part = _Parser(text).whole()
        last = self._part.parts[-1] if isinstance(self._part, PatternSequence) and self._part.parts else self._part
        self._tail = last.text if isinstance(last, Literal) else ""  # rules out most names at once

    def matches(self, text: str) -> bool:
        """True if it matches a whole name, as `re.fullmatch` does."""
        self._names.budget.spend()
        if not text.endswith(self._tail):
            return False
        name = self._names.of(text)
        return self._part.starts(name, name.end) & 1 != 0

    def matches_end(self, text: str) -> bool:
        """True if it matches a whole name, or the part after one of its dots."""
        self._names.budget.spend()
        if not text.endswith(self._tail):
            return False
        name = self._names.of(text)
        return self._part.starts(name, name.end) & (1 | name.after_dots) != 0


class _Parser:
    """Reads an expression, character by character."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def whole(self) -> NamePattern:
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

    def _choice(self) -> NamePattern:
        parts = [self._sequence()]
        while self._next("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else PatternChoice(parts)

    def _sequence(self) -> NamePattern:
        parts: list[NamePattern] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._repeated(self._single())
            if isinstance(part, Literal) and parts and isinstance(parts[-1], Literal):
                part = Literal(parts.pop().text + part.text)  # type: ignore[attr-defined]
            parts.append(part)
        return parts[0] if len(parts) == 1 else PatternSequence(parts)

    def _single(self) -> NamePattern:
        letter = self._text[self._at]
        if letter == "(":
            return self._group()
        self._at += 1
        match letter:
            case ".":
                return ANY_LETTER
            case "^":
                return PLACES["A"]
            case "$":
                return PLACES["$"]
            case "[":
                return Character(self._class())
            case "\\":
                letter = self._escaped()
                if letter in ESCAPED:
                    return ESCAPED[letter]
                if letter in PLACES and letter != "$":
                    return PLACES[letter]
                return Literal(self._plain(letter))
        if letter in "*+?{":
            self._at -= 1
            raise self._refused(f"a {letter!r} that repeats nothing")
        return Literal(letter)

    def _group(self) -> NamePattern:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._refused(f"groups in more than {_MAX_DEPTH} groups")
        if self._next("(?!"):
            part: NamePattern = Lookahead(self._choice(), negative=True)
        elif self._next("(?="):
            part = Lookahead(self._choice(), negative=False)
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

    def _repeated(self, part: NamePattern) -> NamePattern:
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
        if isinstance(part, Literal) and len(part.text) == 1:
            part = Character(Letters(part.text))
        self._at, after = start, self._at  # where errors point
        if isinstance(part, Where | Lookahead):
            raise self._refused("a repeat of an anchor or a look-ahead")
        if (least, most) != (0, 1) and not isinstance(part, Character) and repeats_groups(part):
            raise self._refused("a repeat of a group with a repeated group or a look-ahead in it")
        self._at = after
        return Repeat(part, least, most)

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

    def _class(self) -> Letters:
        excluded = self._next("^")
        if self._text.startswith("]", self._at):
            raise self._refused("an empty class (write '\\]' for a bracket)")
        singles, ranges, kinds = set[str](), list[tuple[str, str]](), set[str]()
        while not self._next("]"):
            first, kind = self._of_class()
            if kind:
                kinds.add(kind)
            elif self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last, kind = self._of_class()
                if kind or last < first:
                    raise self._refused("a range of a class that does not ascend")
                ranges.append((first, last))
            else:
                singles.add(first)
        return Letters(singles, ranges, [KINDS[kind] for kind in kinds], excluded=excluded)

    def _of_class(self) -> tuple[str, str]:
        """Read a character of a class, or an escaped kind of letters."""
        letter = self._text[self._at : self._at + 1]
        if not letter:
            raise self._refused("a class without its ']'")
        self._at += 1
        if letter != "\\":
            return letter, ""
        letter = self._escaped()
        return ("", letter) if letter in KINDS else (self._plain(letter), "")
