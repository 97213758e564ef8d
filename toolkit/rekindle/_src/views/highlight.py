"""The parts of code in an answer: keywords, strings, numbers and comments, in one pass over its characters.

A model writes the code, so it is read as in `markdown`: nothing here goes back, as patterns of Pygments do (decision
15). A language that is not in the table is one part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple


class Language(NamedTuple):
    """The words and signs of a family of languages."""

    keywords: frozenset[str]
    comment: tuple[str, ...]  # a line is one from such a sign on
    block: tuple[str, str] | None  # a comment from the first sign to the second
    quotes: tuple[str, ...]  # the longest first; a string of one character ends with its line, unless it is "`"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PYTHON = Language(
    _words(
        "False None True and as assert async await break case class continue def del elif else except finally for from "
        "global if import in is lambda match nonlocal not or pass raise return try while with yield self"
    ),
    ("#",),
    None,
    ('"""', "'''", '"', "'"),
)
_BRACES = Language(
    _words(
        "abstract async await auto bool boolean break case catch char class const constexpr continue debugger default "
        "delete do double else enum export extends extern false final finally float fn for from func function go goto "
        "if impl implements import in inline instanceof int interface let long loop match mod module mut namespace new "
        "nil null nullptr of operator override package private protected pub public return self short sizeof static "
        "string struct super switch template this throw trait true try type typedef typeof undefined union unsafe "
        "unsigned use using var virtual void volatile where while yield"
    ),
    ("//",),
    ("/*", "*/"),
    ('"', "'", "`"),
)
_SHELL = Language(
    _words("case cd do done echo elif else esac exit export fi for function if in local return set source then while"),
    ("#",),
    None,
    ('"', "'"),
)
_SQL = Language(
    _words(
        "all alter and as asc between by case create cross default delete desc distinct drop else end exists from full "
        "group having in index inner insert into is join key left like limit not null offset on or order outer primary "
        "references right select set table then union unique update values view when where with"
    ),
    ("--",),
    ("/*", "*/"),
    ("'", '"'),
)
_DATA = Language(_words("true false null yes no on off"), ("#",), None, ('"', "'"))
_NAMES = {
    _PYTHON: "python py python3 ipython pycon",
    _BRACES: "c h cpp c++ cc cs csharp cuda dart go java javascript js json json5 jsonc jsx kotlin php rust rs scala "
    "swift ts tsx typescript",
    _SHELL: "bash sh shell zsh console dockerfile",
    _SQL: "sql sqlite postgresql mysql",
    _DATA: "yaml yml toml ini",
}
LANGUAGES = {name: language for language, names in _NAMES.items() for name in names.split()}


Kind = Literal["", "keyword", "string", "number", "comment"]


def pieces(code: str, language: str) -> Iterator[tuple[str, Kind]]:
    """Yield code in pieces, each with its kind, in a language that is known by this name; else in one piece."""
    known = LANGUAGES.get(language.lower())
    start = plain = 0
    while known is not None and start < len(code):
        stop, kind = _piece(code, start, known)
        if kind:
            if plain < start:
                yield code[plain:start], ""
            yield code[start:stop], kind
            plain = stop
        start = stop
    if plain < len(code):
        yield code[plain:], ""


def _piece(code: str, start: int, language: Language) -> tuple[int, Kind]:
    """Return the end of the piece that begins at `start`, and its kind; empty for plain text."""
    sign = code[start]
    if sign.isalpha() or sign == "_":
        stop = _run(code, start)
        word = code[start:stop]
        known = (word.lower() if language is _SQL else word) in language.keywords
        return stop, "keyword" if known else ""
    if sign.isdecimal():
        return _run(code, start, "."), "number"
    if code.startswith(language.comment, start):
        end = code.find("\n", start)
        return len(code) if end < 0 else end, "comment"
    if language.block is not None and code.startswith(language.block[0], start):
        end = code.find(language.block[1], start + 2)
        return len(code) if end < 0 else end + 2, "comment"
    quote = next((quote for quote in language.quotes if code.startswith(quote, start)), "")
    return (_end_of_string(code, start + len(quote), quote), "string") if quote else (start + 1, "")


def _run(code: str, start: int, more: str = "") -> int:
    """Return the end of a run of letters, digits, underscores and the signs in `more`."""
    stop = start + 1
    while stop < len(code) and (code[stop].isalnum() or code[stop] == "_" or code[stop] in more):
        stop += 1
    return stop


def _end_of_string(code: str, start: int, quote: str) -> int:
    """Return the end of a string that began before `start`. An unclosed string ends with its line or with the code."""
    lines = len(quote) > 1 or quote == "`"
    stop = start
    while stop < len(code):
        if code.startswith(quote, stop):
            return stop + len(quote)
        if code[stop] == "\n" and not lines:
            return stop
        stop += 2 if code[stop] == "\\" else 1
    return len(code)
