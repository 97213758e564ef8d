"""Reads JSON while it arrives: an object that describes a call, or the arguments of a named call.

The arguments of an object arrive in pieces if its name comes first and is a tool's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from rekindle._src.text.replies.call import (
    ARGUMENTS,
    NAMES,
    SPACE,
    Calls,
    MalformedCall,
    Reading,
    ReplyCall,
    TextSource,
    ahead,
    capture,
    forward,
    json_call,
    named_call,
    peek,
    skip_space,
    take,
)

_STOPS = re.compile(r'\\.?|["\x00-\x1f]', re.DOTALL)

ReadValue = Callable[[str], Reading[bool]]  # reads the value after a key, or returns False and leaves it unread
MAX_DEPTH = 64
MAX_WORD = 400  # characters of a number; Python refuses to read whole numbers of more than 4,300 digits
_PLAIN = re.compile(r'[^"\\]+')  # raw line breaks match too: models write them, and `json_calls` escapes them
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_VALUE = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"


def read_json_call(calls: Calls, *, complete: bool = False) -> Reading[ReplyCall]:
    """Return the call that the next JSON object describes, as `json_call` reads it."""
    return json_call((yield from read_json(calls.source, _Values(calls))), complete=complete)


def read_objects(calls: Calls) -> Reading[None]:
    """Read one JSON object, or an array of them, perhaps without its end; each is a call as soon as it is whole."""
    source = calls.source
    if not (yield from take(source, "[")):
        calls.emit((yield from read_json_call(calls)))
        return
    while True:
        calls.emit((yield from read_json_call(calls)))
        more = yield from take(source, ",")
        if (yield from take(source, "]")) or not more:
            return


def read_keyed_objects(calls: Calls) -> Reading[None]:
    """Read `[{"name": {…}}, …]`: objects with the arguments of a call under the tool's name."""
    source = calls.source
    several = yield from take(source, "[")
    while True:
        if not (yield from take(source, "{")) or not (yield from ahead(source, '"')):
            raise MalformedCall
        yield from skip_space(source)
        name = json.loads((yield from capture(source, read_string(source))), strict=False)
        if not (yield from take(source, ":")):
            raise MalformedCall
        text = yield from read_arguments(calls, name, depth=1)
        if not (yield from take(source, "}")):
            raise MalformedCall
        calls.emit(named_call(name, text))
        more = several and (yield from take(source, ","))
        if not several or (yield from take(source, "]")) or not more:
            return


def read_arguments(calls: Calls, name: str, *, depth: int = 0, id: str = "") -> Reading[str]:
    """Return the JSON object with the arguments of a call of `name`, and pass it on while it arrives."""
    tell = calls.begin(name, id)
    if tell is None:
        return (yield from read_json(calls.source, depth=depth))
    escaped = _JsonEscaper()
    return (yield from forward(calls.source, read_json(calls.source, depth=depth), lambda piece: tell(escaped(piece))))


class _Values:
    """Reads those values of a call's object that matter before the object is complete."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._name: str | None = None
        self._has_arguments = False  # arguments were read
        self._sent = False  # and sent already

    def __call__(self, key_text: str) -> Reading[bool]:
        key = json.loads(key_text, strict=False)
        if key not in NAMES and key not in ARGUMENTS:
            return False
        if self._sent:  # it would change arguments that are sent
            raise MalformedCall
        first, self._has_arguments = not self._has_arguments, self._has_arguments or key not in NAMES
        source = self._calls.source
        char = yield from peek(source)
        if key in NAMES and char == '"':
            name = json.loads((yield from capture(source, read_string(source))), strict=False)
            if key == NAMES[0] or self._name is None:
                self._name = name
            return True
        if key in NAMES or char != "{" or self._name is None or not first:
            return False
        self._sent = self._calls.streams(self._name)
        yield from read_arguments(self._calls, self._name, depth=1)
        return True


class _JsonEscaper:
    """Pieces of JSON text with escapes for control characters inside of strings, which models write as they are."""

    def __init__(self) -> None:
        self._inside = False  # of a string
        self._escape = False  # the last piece ended with a backslash

    def __call__(self, piece: str) -> str:
        start = 1 if self._escape and piece else 0
        self._escape = self._escape and not piece
        return piece[:start] + _STOPS.sub(self._stop, piece[start:])

    def _stop(self, match: re.Match[str]) -> str:
        text = match.group()
        if text == '"':
            self._inside = not self._inside
        elif text == "\\":
            self._escape = True
        elif self._inside and text < " ":
            return json.dumps(text)[1:-1]
        return text


def read_json(source: TextSource, value_of: ReadValue | None = None, *, depth: int = 0) -> Reading[str]:
    """Return the text of the next JSON object, after whitespace. Raises `MalformedCall` if there is none.

    `value_of` may read the values of this object itself; it gets their keys as JSON. The object
    is nested in `depth` others.
    """
    char = yield from peek(source)
    while char and char in SPACE:
        source.at += 1
        char = yield from peek(source)
    if char != "{":
        raise MalformedCall
    return (yield from capture(source, _read_object(source, value_of, depth)))


def _read_object(source: TextSource, value_of: ReadValue | None, depth: int) -> Reading[None]:
    closers: list[str] = []
    key = ""  # of a value of this object
    expected = "value"  # or: "key", "first key", "colon", "comma", "first value"
    while True:
        char = yield from peek(source)
        if char == "":
            raise MalformedCall
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
                return
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
                    raise MalformedCall
                expected = "first key" if char == "{" else "first value"
            else:
                yield from read_string(source) if char == '"' else _read_word(source)
                expected = "comma"
        else:
            raise MalformedCall


def read_string(source: TextSource) -> Reading[None]:
    """Read a string, which begins with a quote."""
    source.at += 1
    while True:
        char = yield from peek(source)
        if char == "":
            raise MalformedCall
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


def _read_escape(source: TextSource) -> Reading[None]:
    char = yield from peek(source)
    if char == "u":
        source.at += 1
        for _ in range(4):
            char = yield from peek(source)
            if char == "" or char not in _HEX:
                raise MalformedCall
            source.at += 1
    elif char and char in _ESCAPES:
        source.at += 1
    else:
        raise MalformedCall


def _read_word(source: TextSource) -> Reading[None]:
    word = ""
    while True:
        char = yield from peek(source)
        match = _WORD.match(source.text, source.at) if char else None
        if match is None:
            break
        word += match.group()
        if len(word) > MAX_WORD:
            raise MalformedCall
        source.at = match.end()
    if _VALUE.fullmatch(word) is None:
        raise MalformedCall
