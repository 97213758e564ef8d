"""The object of a structured text, built on first access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rekindle.errors import NotParsed


class Parsed(NamedTuple):
    """An object, or the reason why there is none."""

    value: Any = None
    problem: NotParsed | None = None


class Parsing:
    """Builds the object of a text, in the thread that asks for it, since users' classes take part."""

    __slots__ = ("_parse", "_parsed", "_text")

    def __init__(self, text: str, parse: Callable[[str], Any], problem: NotParsed | None = None) -> None:
        self._text, self._parse = text, parse
        self._parsed = None if problem is None else Parsed(None, problem)

    def get(self) -> Parsed:
        """Return the object, the same one each time. A validator's objection becomes the problem of the result."""
        if self._parsed is None:
            try:
                self._parsed = Parsed(self._parse(self._text))
            except Exception as error:
                message = str(error).strip() or type(error).__name__
                problem = NotParsed("invalid", f"the text does not validate: {message}")
                problem.__cause__ = error
                self._parsed = Parsed(None, problem)
        return self._parsed

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._text, self.get())


def _made(text: str, parsed: Parsed) -> Parsing:
    parsing = Parsing(text, str)
    parsing._parsed = parsed
    return parsing
