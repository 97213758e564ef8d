"""Reads a call that is a JSON object. Its arguments arrive in pieces if its name comes first and is a tool's."""

from __future__ import annotations

import json
import re

from rekindle._src.text.replies.call import ARGUMENTS, Call, json_call
from rekindle._src.text.replies.json_reader import read_json, read_string
from rekindle._src.text.replies.source import Malformed, Reading, capture, forward, peek
from rekindle._src.text.replies.syntax import Calls

_STOPS = re.compile(r'\\.?|["\x00-\x1f]', re.DOTALL)


def read_json_call(calls: Calls, *, complete: bool = False) -> Reading[Call]:
    """Return the call that the next JSON object describes, as `json_call` reads it."""
    return json_call((yield from read_json(calls.source, _Values(calls))), complete=complete)


def read_arguments(calls: Calls, name: str, *, depth: int = 0) -> Reading[str]:
    """Return the JSON object with the arguments of a call of `name`, and pass it on while it arrives."""
    tell = calls.begin(name)
    if tell is None:
        return (yield from read_json(calls.source, depth=depth))
    escaped = _Escaped()
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
        if key != "name" and key not in ARGUMENTS:
            return False
        if self._sent:  # it would change arguments that are sent
            raise Malformed
        first, self._has_arguments = not self._has_arguments, self._has_arguments or key != "name"
        source = self._calls.source
        char = yield from peek(source)
        if key == "name" and char == '"':
            self._name = json.loads((yield from capture(source, read_string(source))), strict=False)
            return True
        if key == "name" or char != "{" or self._name is None or not first:
            return False
        self._sent = self._calls.streams(self._name)
        yield from read_arguments(self._calls, self._name, depth=1)
        return True


class _Escaped:
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
