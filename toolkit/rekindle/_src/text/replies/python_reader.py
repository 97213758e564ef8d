"""Reads calls in Python's notation while they arrive: a name, and in parentheses literals by keyword.

JSON's words count as well: `true`, `false` and `null`.
"""

from __future__ import annotations

import re
from typing import Any

from rekindle._src.text.replies.arguments import Arguments
from rekindle._src.text.replies.call import (
    MAX_NAME,
    Calls,
    MalformedCall,
    Reading,
    ReplyCall,
    TextSource,
    peek,
    skip_space,
    take,
)
from rekindle._src.text.replies.json_reader import MAX_DEPTH, MAX_WORD

_NAME = re.compile(r"[^\W\d][\w.-]*")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]++\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}


def read_python_list(calls: Calls, *, only_known: bool = False) -> Reading[None]:
    """Read calls to the end of a list that has been opened. With `only_known`, the first has to name a tool."""
    while True:
        calls.emit((yield from read_call(calls, only_known=only_known)))
        only_known = False
        more = yield from take(calls.source, ",")
        if (yield from take(calls.source, "]")) or not more:
            return


def read_call(calls: Calls, *, only_known: bool) -> Reading[ReplyCall]:
    """Return the next call, after whitespace.

    A positional argument is the parameter at its place, if the tool is known. With `only_known`, a name that is not
    a tool's is `MalformedCall`, as soon as the parenthesis is read.
    """
    source, known = calls.source, calls.known
    yield from skip_space(source)
    name = yield from read_word(source, MAX_NAME)
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


def read_calls(source: TextSource) -> Reading[list[dict[str, Any]]]:
    """Return the calls of a list such as `[f(a=1), g()]`. Their arguments have names."""
    calls: list[dict[str, Any]] = []
    if not (yield from take(source, "[")):
        raise MalformedCall
    while not (yield from take(source, "]")):
        if calls and not (yield from take(source, ",")):
            raise MalformedCall
        yield from skip_space(source)
        name, arguments = (yield from read_word(source, MAX_NAME)), dict[str, Any]()
        if _NAME.fullmatch(name) is None or not (yield from take(source, "(")):
            raise MalformedCall
        while not (yield from take(source, ")")):
            if arguments and not (yield from take(source, ",")):
                raise MalformedCall
            key, value = yield from _read_argument(source)
            if key is None or key in arguments:
                raise MalformedCall
            arguments[key] = value
        calls.append({"name": name, "arguments": arguments})
    return calls


def _read_argument(source: TextSource) -> Reading[tuple[str | None, Any]]:
    """Return the name and the value of an argument; a positional one has no name."""
    yield from skip_space(source)
    char = yield from peek(source)
    if char == "" or not (char.isalpha() or char == "_"):
        return None, (yield from read_value(source, 1))
    word = yield from read_word(source, MAX_NAME)
    if (yield from take(source, "=")):
        if _NAME.fullmatch(word) is None:
            raise MalformedCall
        return word, (yield from read_value(source, 1))
    if word not in _WORDS:
        raise MalformedCall
    return None, _WORDS[word]


def read_value(source: TextSource, depth: int = 0) -> Reading[Any]:
    """Return the next literal, after whitespace. Raises `MalformedCall` if there is none."""
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
    word = yield from read_word(source, MAX_WORD)
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
        items.append((yield from read_value(source, depth + 1)))
        if not (yield from take(source, ",")):
            if not (yield from take(source, closer)):
                raise MalformedCall
            break
    return items


def _read_dict(source: TextSource, depth: int) -> Reading[dict[str, Any]]:
    source.at += 1
    items: dict[str, Any] = {}
    while not (yield from take(source, "}")):
        key = yield from read_value(source, depth + 1)
        if not isinstance(key, str) or not (yield from take(source, ":")):
            raise MalformedCall
        items[key] = yield from read_value(source, depth + 1)
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
            parts.append((yield from _read_escape(source)))
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


def _read_escape(source: TextSource) -> Reading[str]:
    char = yield from peek(source)
    if char == "":
        raise MalformedCall
    source.at += 1
    if char not in _HEX:
        return _ESCAPES.get(char, "\\" + char)
    digits = ""
    for _ in range(_HEX[char]):
        digit = yield from peek(source)
        if digit == "" or digit not in "0123456789abcdefABCDEF":
            raise MalformedCall
        digits += digit
        source.at += 1
    if int(digits, 16) > 0x10FFFF:
        raise MalformedCall
    return chr(int(digits, 16))


def read_word(source: TextSource, limit: int) -> Reading[str]:
    """Read letters, digits, `_`, `.`, `+` and `-`."""
    word: list[str] = []
    while (char := (yield from peek(source))) and (char.isalnum() or char in "_.+-"):
        if len(word) == limit:
            raise MalformedCall
        word.append(char)
        source.at += 1
    return "".join(word)
