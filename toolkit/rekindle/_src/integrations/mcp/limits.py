"""Bounds on a tool server: its messages before they are read, its tools before anybody sees them, and its results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rekindle._src.core.json_values import count_values
from rekindle._src.core.names import printable

MOST_MESSAGE = 4 << 20  # bytes of a message
MOST_VALUES = 32_768  # JSON values of a message: the protocol's library has a list of errors for each wrong one
MOST_DEEP = 64  # levels of a message
MOST_MARKS = 3 * MOST_VALUES + 1_024  # commas, colons and opening brackets; a named object has three
MOST_ASKED = 16  # requests of a server without an answer yet; the protocol's library has a task for each
MOST_LISTED = 1_024  # tools that a server may list, on all pages
MOST_PAGES = 64  # of the list of tools
MOST_TOOLS = 128  # that a chat gets from a server
MOST_TOOL = 32_768  # characters of a tool's description and schema
MOST_NAME = 64  # characters of a tool's name with the server's
MOST_SERVER_NAME = 32
MOST_RESULT = 65_536  # characters of a result; the rest is left out, and the result says so
MOST_BLOCKS = 256  # texts, pictures and others of a result
MOST_SAID = 400  # characters of a server's own words in an error
TOO_MANY_VALUES = f"sent a message of more than {MOST_VALUES:,} JSON values"
LAST_WORDS = 2_048  # bytes of a program's standard error that are kept


def said(text: object) -> str:
    """Return a server's words for an error message, on one line."""
    return printable(" ".join(str(text)[: 4 * MOST_SAID].split()), MOST_SAID)


def unparsed_problem(data: bytes | bytearray) -> str | None:
    """Return why a message is not even parsed: the library holds the interpreter's lock until it is done."""
    few = count_values(data, MOST_MARKS, MOST_MARKS).values <= MOST_MARKS
    return None if few else TOO_MANY_VALUES


def id_of(data: bytes | bytearray) -> int | None:
    """Return the id at the beginning or the end of an answer that is not parsed; None if there is none.

    A server's own question may have the number of one of ours: it is no answer.
    """
    head = data[:_ID_BYTES]
    match = _FIRST_ID.match(head) or (_LAST_ID.search(data[-_ID_BYTES:]) if _ANSWER.match(head) else None)
    return None if match is None else int(match[1])


_ID_BYTES = 128
_ANSWER = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"(?:result|error)"\s*:')
_FIRST_ID = re.compile(
    rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,18})\s*,\s*'
    rb'(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"(?:result|error)"\s*:'
)
_LAST_ID = re.compile(rb',\s*"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z')


def problem_of(value: object) -> str | None:
    """Return why a message's content is not passed on to the protocol's library; None if it is."""
    values, level = 0, [value]
    for _ in range(MOST_DEEP):
        below: list[object] = []
        for one in level:
            if isinstance(one, Mapping):
                below += one.values()
            elif isinstance(one, list):
                below += one
        values += len(below)
        if values > MOST_VALUES:
            return TOO_MANY_VALUES
        if not below:
            return None
        level = below
    return f"sent a message of more than {MOST_DEEP} levels"


def safe_name(name: str) -> str:
    """Return the name of a server or tool with `_` for characters that a model's calls may not have."""
    return "".join(one if one.isascii() and (one.isalnum() or one in "-_") else "_" for one in name[: 2 * MOST_NAME])


def schema_problem(parameters: object, description: str) -> str | None:
    """Return why a tool's description and schema can't be shown to a model; None if they can."""
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        return "has parameters that are no JSON schema of an object"
    if not isinstance(parameters.get("properties", {}), Mapping):
        return "has properties that are no JSON schemas by name"
    if (problem := problem_of(parameters)) is not None:
        return problem.replace("sent a message", "has a schema")
    size = len(description) + len(json.dumps(parameters, default=str))
    return f"has {size:,} characters of description and schema, over {MOST_TOOL:,}" if size > MOST_TOOL else None


def text_of(content: list[Any], structured: object = None) -> str:
    """Return a tool's result as text for the model. Anything but text is named, and left out."""
    texts = list[str]()
    room, left = MOST_RESULT, 0
    shown = content[:MOST_BLOCKS]
    for block in shown:
        text = _text_of(block)
        texts.append(text[:room])
        left += len(text) - len(texts[-1])
        room -= len(texts[-1])
    if not shown and structured is not None:
        text = json.dumps(structured, ensure_ascii=False, default=str)
        texts, left = [text[:room]], max(0, len(text) - room)
    if left:
        texts.append(f"[{left:,} more characters of the result are left out]")
    if len(content) > MOST_BLOCKS:
        texts.append(f"[{len(content) - MOST_BLOCKS:,} more parts of the result are left out]")
    return "\n".join(texts)


def _text_of(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return _named(block.type, block.mime_type, block.data)
        case "resource":
            resource = block.resource
            text = getattr(resource, "text", None)
            return text if isinstance(text, str) else _named("resource", resource.mime_type, resource.blob)
        case "resource_link":
            return f"[resource {printable(str(block.uri), MOST_SAID)}]"
        case other:
            return f"[{said(other)} is left out]"


def _named(kind: str, mime: object, data: str) -> str:
    """Name a part that is not passed on; `data` is in base64."""
    return f"[{kind} of {len(data) * 3 // 4:,} bytes, {said(mime or 'of no known type')}: only text is passed on]"
