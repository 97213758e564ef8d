"""Reads loose JSON, with keys that need no quotes and texts between marks of their own, and calls with it.

Gemma writes `call:f{n:1,s:<|"|>text<|"|>,o:{k:[true,null]}}`.
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
    ahead,
    peek,
    skip_space,
    take,
)
from rekindle._src.text.replies.json_reader import MAX_DEPTH
from rekindle._src.text.replies.python_reader import read_value
from rekindle._src.text.replies.tag_reader import read_to

Quotes = tuple[tuple[str, str], ...]  # what stands before and after a text
GEMMA: Quotes = (('<|"|>', '<|"|>'),)
_WORD = re.compile(r"[\w.-]+")


def read_gemma_call(calls: Calls, *, only_known: bool = False) -> Reading[ReplyCall]:
    """Return the next call, `call:name{…}`. `call:` or its first letters may be missing."""
    source = calls.source
    name = yield from _read_word(source)
    if (yield from take(source, ":")):
        name = yield from _read_word(source)
    if not name or (only_known and name not in calls.known) or not (yield from take(source, "{")):
        raise MalformedCall
    arguments = Arguments(calls.begin(name))
    while not (yield from take(source, "}")):
        key = yield from _read_key(source, GEMMA)
        arguments.add(key, (yield from _read_value(source, GEMMA, 1)))
        if not (yield from take(source, ",")):
            if not (yield from take(source, "}")):
                raise MalformedCall
            break
    return arguments.call(name)


def _read_word(source: TextSource) -> Reading[str]:
    yield from skip_space(source)
    word = ""
    while (yield from peek(source)):
        match = _WORD.match(source.text, source.at)
        if match is None:
            break
        word += match.group()
        if len(word) > MAX_NAME:
            raise MalformedCall
        source.at = match.end()
    return word


def read_loose_value(source: TextSource, quotes: Quotes) -> Reading[Any]:
    """Return the next value, after whitespace. Raises `MalformedCall` if there is none."""
    return (yield from _read_value(source, quotes, 0))


def _read_key(source: TextSource, quotes: Quotes) -> Reading[str]:
    """Read a key with its colon, bare or quoted as a text."""
    for begin, _ in (*quotes, ('"', '"')):
        if (yield from ahead(source, begin)):
            key = yield from _read_value(source, quotes, MAX_DEPTH)
            if not isinstance(key, str) or not (yield from take(source, ":")):
                raise MalformedCall
            return key
    yield from skip_space(source)
    key = (yield from read_to(source, ":", MAX_NAME)).strip()
    if not key:
        raise MalformedCall
    return str(key)


def _read_value(source: TextSource, quotes: Quotes, depth: int) -> Reading[Any]:
    for begin, end in quotes:
        if (yield from take(source, begin)):
            return (yield from read_to(source, end, None))
    if depth > MAX_DEPTH:
        raise MalformedCall
    if (yield from take(source, "[")):
        items: list[Any] = []
        while not (yield from take(source, "]")):
            items.append((yield from _read_value(source, quotes, depth + 1)))
            if not (yield from take(source, ",")) and not (yield from ahead(source, "]")):
                raise MalformedCall
        return items
    if (yield from take(source, "{")):
        values: dict[str, Any] = {}
        while not (yield from take(source, "}")):
            key = yield from _read_key(source, quotes)
            values[key] = yield from _read_value(source, quotes, depth + 1)
            if not (yield from take(source, ",")) and not (yield from ahead(source, "}")):
                raise MalformedCall
        return values
    return (yield from read_value(source, depth))
