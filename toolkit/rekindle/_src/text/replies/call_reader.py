"""Readers of one call while it arrives, in the notations that families write: JSON, XML and Python.

A JSON object's arguments arrive in pieces if its name comes first and is a tool's. XML is `<function=name>` with
`<parameter=key>value</parameter>` inside, as Qwen3-Coder writes calls; Python is a name, and in parentheses literals by
keyword. The arguments of both are passed on as JSON, one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rekindle._src.text.replies.call import (
    ARGUMENTS,
    MAX_NAME,
    SPACE,
    Calls,
    MalformedCall,
    Reading,
    ReplyCall,
    TextSource,
    as_json,
    capture,
    forward,
    json_call,
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

_NAME = re.compile(r"[^\W\d][\w.-]*")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]++\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_PYTHON_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_PYTHON_HEX = {"x": 2, "u": 4, "U": 8}


def read_json_call(calls: Calls, *, complete: bool = False) -> Reading[ReplyCall]:
    """Return the call that the next JSON object describes, as `json_call` reads it."""
    return json_call((yield from read_json(calls.source, _Values(calls))), complete=complete)


def read_arguments(calls: Calls, name: str, *, depth: int = 0) -> Reading[str]:
    """Return the JSON object with the arguments of a call of `name`, and pass it on while it arrives."""
    tell = calls.begin(name)
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
        if key != "name" and key not in ARGUMENTS:
            return False
        if self._sent:  # it would change arguments that are sent
            raise MalformedCall
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


class Arguments:
    """Takes arguments in their order; `tell` receives each of them as a part of one JSON object."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._values: dict[str, Any] = {}
        if tell is not None:
            tell("{")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, value: Any) -> None:
        """Add an argument; raises `MalformedCall` for a name that is there already."""
        if name in self._values:
            raise MalformedCall
        if self._tell is not None:
            self._tell(f"{', ' if self._values else ''}{as_json(name)}: {as_json(value)}")
        self._values[name] = value

    def call(self, name: str) -> ReplyCall:
        """Return the call of `name`, once all arguments are there."""
        call = ReplyCall.of(name, self._values)
        if self._tell is not None:
            self._tell("}")
        return call


def read_function(calls: Calls, *, only_known: bool) -> Reading[ReplyCall]:
    """Return the call whose `<function=` has been read, to the end of `</function>`.

    Values are text without quotes. If the schema allows no string, a value that is valid JSON is read as JSON.
    """
    source, known = calls.source, calls.known
    name = (yield from _read_to(source, ">", MAX_NAME)).strip()
    if only_known and name not in known:
        raise MalformedCall
    schemas = known.get(name, {})
    arguments = Arguments(calls.begin(name))
    while not (yield from take(source, "</function>")):
        if not (yield from take(source, "<parameter=")):
            raise MalformedCall
        key = (yield from _read_to(source, ">", MAX_NAME)).strip()
        text = yield from _read_to(source, "</parameter>", None)
        if not key:
            raise MalformedCall
        arguments.add(key, _value(text.removeprefix("\n").removesuffix("\n"), schemas.get(key)))
    return arguments.call(name)


def _read_to(source: TextSource, end: str, limit: int | None) -> Reading[str]:
    """Return the text before `end`, and read past it."""
    parts: list[str] = []
    length = 0
    while True:
        if (yield from peek(source)) == "":
            raise MalformedCall
        end_at = source.text.find(end, source.at)
        stop = end_at if end_at >= 0 else max(source.at, len(source.text) - len(end) + 1)
        parts.append(source.text[source.at : stop])
        length += stop - source.at
        if limit is not None and length > limit:
            raise MalformedCall
        source.at = stop + len(end) if end_at >= 0 else stop
        if end_at >= 0:
            return "".join(parts)
        if source.ended:
            source.at = len(source.text)
            raise MalformedCall
        yield


def _value(text: str, schema: object) -> Any:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds is None or kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        words = {"True": True, "False": False, "None": None}
        return words.get(text.strip(), text)


def read_call(calls: Calls, *, only_known: bool) -> Reading[ReplyCall]:
    """Return the next call, after whitespace.

    A positional argument is the parameter at its place, if the tool is known. With `only_known`, a name that is not
    a tool's is `MalformedCall`, as soon as the parenthesis is read.
    """
    source, known = calls.source, calls.known
    yield from skip_space(source)
    name = yield from _read_python_word(source, MAX_NAME)
    if _NAME.fullmatch(name) is None or (only_known and name not in known):
        raise MalformedCall
    if not (yield from take(source, "(")):
        raise MalformedCall
    places = list(known.get(name, ()))
    arguments = Arguments(calls.begin(name))
    while not (yield from take(source, ")")):
        key, value = yield from _read_argument(source)
        if key is None:
            if len(arguments) >= len(places):
                raise MalformedCall
            key = places[len(arguments)]
        arguments.add(key, value)
        if not (yield from take(source, ",")):
            if not (yield from take(source, ")")):
                raise MalformedCall
            break
    return arguments.call(name)


def _read_argument(source: TextSource) -> Reading[tuple[str | None, Any]]:
    """Return the name and the value of an argument; a positional one has no name."""
    yield from skip_space(source)
    char = yield from peek(source)
    if char == "" or not (char.isalpha() or char == "_"):
        return None, (yield from _read_value(source, 1))
    word = yield from _read_python_word(source, MAX_NAME)
    if (yield from take(source, "=")):
        if _NAME.fullmatch(word) is None:
            raise MalformedCall
        return word, (yield from _read_value(source, 1))
    if word not in _WORDS:
        raise MalformedCall
    return None, _WORDS[word]


def _read_value(source: TextSource, depth: int) -> Reading[Any]:
    yield from skip_space(source)
    char = yield from peek(source)
    if depth > MAX_DEPTH or char == "":
        raise MalformedCall
    if char in "'\"":
        return (yield from _read_string(source, char))
    if char in "[(":
        return (yield from _read_items(source, "]" if char == "[" else ")", depth))
    if char == "{":
        return (yield from _read_dict(source, depth))
    word = yield from _read_python_word(source, MAX_WORD)
    if word in _WORDS:
        return _WORDS[word]
    if _INT.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word):
        return float(word)
    raise MalformedCall


def _read_items(source: TextSource, closer: str, depth: int) -> Reading[list[Any]]:
    source.at += 1
    items: list[Any] = []
    while not (yield from take(source, closer)):
        items.append((yield from _read_value(source, depth + 1)))
        if not (yield from take(source, ",")):
            if not (yield from take(source, closer)):
                raise MalformedCall
            break
    return items


def _read_dict(source: TextSource, depth: int) -> Reading[dict[str, Any]]:
    source.at += 1
    items: dict[str, Any] = {}
    while not (yield from take(source, "}")):
        key = yield from _read_value(source, depth + 1)
        if not isinstance(key, str) or not (yield from take(source, ":")):
            raise MalformedCall
        items[key] = yield from _read_value(source, depth + 1)
        if not (yield from take(source, ",")):
            if not (yield from take(source, "}")):
                raise MalformedCall
            break
    return items


def _read_string(source: TextSource, quote: str) -> Reading[str]:
    source.at += 1
    if (yield from peek(source)) == quote:
        source.at += 1
        if (yield from peek(source)) != quote:
            return ""
        source.at += 1
        quote *= 3
    parts: list[str] = []
    plain = re.compile(rf"[^\\{quote[0]}]+")
    while True:
        char = yield from peek(source)
        if char == "":
            raise MalformedCall
        if char == "\\":
            source.at += 1
            parts.append((yield from _read_python_escape(source)))
        elif char == quote[0]:
            source.at += 1
            quotes = 1
            while quotes < len(quote) and (yield from peek(source)) == char:
                source.at += 1
                quotes += 1
            if quotes == len(quote):
                return "".join(parts)
            parts.append(char * quotes)
        else:
            match = plain.match(source.text, source.at)
            assert match is not None, "the character is neither the quote nor a backslash"
            parts.append(match.group())
            source.at = match.end()


def _read_python_escape(source: TextSource) -> Reading[str]:
    char = yield from peek(source)
    if char == "":
        raise MalformedCall
    source.at += 1
    if char not in _PYTHON_HEX:
        return _PYTHON_ESCAPES.get(char, "\\" + char)
    digits = ""
    for _ in range(_PYTHON_HEX[char]):
        digit = yield from peek(source)
        if digit == "" or digit not in "0123456789abcdefABCDEF":
            raise MalformedCall
        digits += digit
        source.at += 1
    if int(digits, 16) > 0x10FFFF:
        raise MalformedCall
    return chr(int(digits, 16))


def _read_python_word(source: TextSource, limit: int) -> Reading[str]:
    """Read letters, digits, `_`, `.`, `+` and `-`."""
    word: list[str] = []
    while (char := (yield from peek(source))) and (char.isalnum() or char in "_.+-"):
        if len(word) == limit:
            raise MalformedCall
        word.append(char)
        source.at += 1
    return "".join(word)
