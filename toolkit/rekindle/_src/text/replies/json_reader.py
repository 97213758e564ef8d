"""Reads one JSON object while it arrives, and stops at the first character that can't be part of one."""

from __future__ import annotations

import re
from collections.abc import Callable

from rekindle._src.text.replies.source import SPACE, Malformed, Reading, Source, capture, peek

ReadValue = Callable[[str], Reading[bool]]  # reads the value behind a key, or returns False and leaves it unread

MAX_DEPTH = 64
MAX_WORD = 400  # characters of a number; Python refuses to read whole numbers of more than 4,300 digits
_PLAIN = re.compile(r'[^"\\]+')  # raw line breaks match too: models write them, and `json_calls` escapes them
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_VALUE = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"


def read_json(source: Source, value_of: ReadValue | None = None, *, depth: int = 0) -> Reading[str]:
    """Return the text of the next JSON object, after whitespace. Raises `Malformed` if there is none.

    `value_of` may read the values of this object itself; it gets their keys as JSON. The object
    is nested in `depth` others.
    """
    char = yield from peek(source)
    while char and char in SPACE:
        source.at += 1
        char = yield from peek(source)
    if char != "{":
        raise Malformed
    start = len(source.since_mark())
    closers: list[str] = []
    key = ""  # of a value of this object
    expected = "value"  # or: "key", "first key", "colon", "comma", "first value"
    while True:
        char = yield from peek(source)
        if char == "":
            raise Malformed
        if char in SPACE:
            source.at += 1
        elif expected in ("key", "first key") and char == '"':
            if value_of is not None and len(closers) == 1:
                key = yield from capture(source, read_string(source))
            else:
                yield from read_string(source)
            expected = "colon"
        elif expected == "colon" and char == ":":
            source.at += 1
            expected = "value"
        elif char in "]}" and closers and closers[-1] == char and expected in ("comma", "first key", "first value"):
            source.at += 1
            closers.pop()
            if not closers:
                return source.since_mark()[start:]
            expected = "comma"
        elif expected == "comma" and char == ",":
            source.at += 1
            expected = "key" if closers[-1] == "}" else "value"
        elif expected in ("value", "first value"):
            if value_of is not None and closers == ["}"] and (yield from value_of(key)):
                expected = "comma"
            elif char in "{[":
                source.at += 1
                closers.append("}" if char == "{" else "]")
                if len(closers) + depth > MAX_DEPTH:
                    raise Malformed
                expected = "first key" if char == "{" else "first value"
            else:
                yield from read_string(source) if char == '"' else _read_word(source)
                expected = "comma"
        else:
            raise Malformed


def read_string(source: Source) -> Reading[None]:
    """Read a string, which begins with a quote."""
    source.at += 1
    while True:
        char = yield from peek(source)
        if char == "":
            raise Malformed
        if char == '"':
            source.at += 1
            return
        if char == "\\":
            source.at += 1
            yield from _read_escape(source)
        else:
            plain = _PLAIN.match(source.text, source.at)
            assert plain is not None, "the character is neither a quote nor a backslash"
            source.at = plain.end()


def _read_escape(source: Source) -> Reading[None]:
    char = yield from peek(source)
    if char == "u":
        source.at += 1
        for _ in range(4):
            char = yield from peek(source)
            if char == "" or char not in _HEX:
                raise Malformed
            source.at += 1
    elif char and char in _ESCAPES:
        source.at += 1
    else:
        raise Malformed


def _read_word(source: Source) -> Reading[None]:
    word = ""
    while True:
        char = yield from peek(source)
        match = _WORD.match(source.text, source.at) if char else None
        if match is None:
            break
        word += match.group()
        if len(word) > MAX_WORD:
            raise Malformed
        source.at = match.end()
    if _VALUE.fullmatch(word) is None:
        raise Malformed
