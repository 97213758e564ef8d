"""Reads `<function=name>` with `<parameter=key>value</parameter>` inside, as Qwen3-Coder writes calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle._src.text.replies.arguments import Arguments
from rekindle._src.text.replies.call import MAX_NAME, Call
from rekindle._src.text.replies.source import Malformed, Reading, Source, peek, take
from rekindle._src.text.replies.syntax import Calls


def read_function(calls: Calls, *, only_known: bool) -> Reading[Call]:
    """Return the call whose `<function=` has been read, to the end of `</function>`.

    Values are text without quotes. If the schema allows no string, a value that is valid JSON is read as JSON.
    """
    source, known = calls.source, calls.known
    name = (yield from _read_to(source, ">", MAX_NAME)).strip()
    if only_known and name not in known:
        raise Malformed
    schemas = known.get(name, {})
    arguments = Arguments(calls.begin(name))
    while not (yield from take(source, "</function>")):
        if not (yield from take(source, "<parameter=")):
            raise Malformed
        key = (yield from _read_to(source, ">", MAX_NAME)).strip()
        text = yield from _read_to(source, "</parameter>", None)
        if not key:
            raise Malformed
        arguments.add(key, _value(text.removeprefix("\n").removesuffix("\n"), schemas.get(key)))
    return arguments.call(name)


def _read_to(source: Source, end: str, limit: int | None) -> Reading[str]:
    """Return the text before `end`, and read past it."""
    parts: list[str] = []
    length = 0
    while True:
        if (yield from peek(source)) == "":
            raise Malformed
        end_at = source.text.find(end, source.at)
        stop = end_at if end_at >= 0 else max(source.at, len(source.text) - len(end) + 1)
        parts.append(source.text[source.at : stop])
        length += stop - source.at
        if limit is not None and length > limit:
            raise Malformed
        source.at = stop + len(end) if end_at >= 0 else stop
        if end_at >= 0:
            return "".join(parts)
        if source.ended:
            source.at = len(source.text)
            raise Malformed
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
