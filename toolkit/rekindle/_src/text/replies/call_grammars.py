"""Grammars of calls, in Lark's notation as llguidance reads it: the text of a model that must call a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle._src.text.replies.call import CallSyntax

Schema = Mapping[str, Any]
Token = Callable[[str], int | None]  # from a marker to its id, if it is a single token
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_grammar(syntax: CallSyntax, tools: Sequence[Schema], token: Token, *, several: bool) -> str:
    """Return the grammar of one call of these tools, or of `several`, in the syntax of a family."""
    functions = [tool.get("function", tool) for tool in tools]
    several = several and syntax.name not in ("llama3_json", "harmony")  # their templates accept one in a message
    calls: list[tuple[str, ...]]
    if syntax.name == "mistral" and token("[ARGS]") is not None:
        begins, ends, between = "", "", ""
        calls = [
            (_mark("[TOOL_CALLS]", token), _text(entry["name"]), _mark("[ARGS]", token), "@args") for entry in functions
        ]
    elif syntax.name == "harmony":
        begins, ends, between = "", "", ""
        marks = [_mark(f"<|{name}|>", token) for name in ("channel", "constrain", "message")]
        channel, constrain, message = marks
        calls = [
            (channel, _text(f"commentary to=functions.{entry['name']} "), constrain, _text("json"), message, "@args")
            for entry in functions
        ]
    elif syntax.name == "olmo":
        begins, ends, between = (
            f"{_mark('<function_calls>', token)} {_text(chr(10))}",
            f"{_text(chr(10))} {_mark('</function_calls>', token)}",
            _text("\n"),
        )
        calls = [(_text(f"{entry['name']}("), "@keywords", _text(")")) for entry in functions]
    else:
        begins, ends, between, key = _frame(syntax.name, token)
        calls = [
            (_text(f'{{"name": {json.dumps(entry["name"])}, "{key}": '), "@args", _text("}")) for entry in functions
        ]
        if syntax.name == "hermes":
            opens, closes = _mark("<tool_call>", token), _mark("</tool_call>", token)
            newline = _text("\n")
            calls = [(opens, newline, *call, newline, closes) for call in calls]
    rules = []
    for index, (function, call) in enumerate(zip(functions, calls, strict=True)):
        schema = function.get("parameters") or function.get("input_schema") or {}
        rules.append(f"call_{index}: " + " ".join(_named(part, index) for part in call))
        if "@args" in call:
            rules.append(f"args_{index}: {_json(_closed(schema))}")
        else:
            rules += _keywords(index, _closed(schema))
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    more = f"({between} call)*" if several else ""
    return "\n".join([f"start: {begins} call {more} {ends}".rstrip(), *rules])


def _frame(name: str, token: Token) -> tuple[str, str, str, str]:
    """Return the texts before, behind and between calls in JSON, and the key of their arguments."""
    comma = _text(", ")
    if name == "mistral":
        return f"{_mark('[TOOL_CALLS]', token)} {_text('[')}", _text("]"), comma, "arguments"
    if name == "phi4mini" and token("<|tool_call|>") is not None:
        opens, closes = _mark("<|tool_call|>", token), _mark("<|/tool_call|>", token)
        return f"{opens} {_text('[')}", f"{_text(']')} {closes}", comma, "arguments"
    if name == "phi4mini":
        return _text("functools["), _text("]"), comma, "arguments"
    if name == "hermes":
        return "", "", _text("\n"), "arguments"
    return "", "", _text("; "), "parameters"


def _named(part: str, index: int) -> str:
    return {"@args": f"args_{index}", "@keywords": f"keywords_{index}"}.get(part, part)


def _keywords(index: int, schema: Schema) -> list[str]:
    """Return rules for `a=1, b="x"`: the required arguments in their order, then any of the others."""
    properties: Schema = schema.get("properties") or {}
    required = [name for name in properties if name in schema.get("required", ())]
    optional = [name for name in properties if name not in required]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = []
    for place, name in enumerate([*required, *optional]):
        inner = properties[name]
        value = _json({**(inner if isinstance(inner, Mapping) else {}), **shared})
        rules.append(f"value_{index}_{place}: {value}")
        rules.append(f"item_{index}_{place}: {_text(name + '=')} value_{index}_{place}")
    comma = _text(", ")
    parts = [f"item_{index}_{place}" for place in range(len(required))]
    places = range(len(required), len(required) + len(optional))
    if required:
        parts = [f" {comma} ".join(parts), *(f"({comma} item_{index}_{place})?" for place in places)]
        return [*rules, f"keywords_{index}: " + " ".join(parts)]
    choices = [
        " ".join([f"item_{index}_{first}", *(f"({comma} item_{index}_{place})?" for place in places if place > first)])
        for first in places
    ]
    return [*rules, f"keywords_{index}: " + " | ".join([*choices, '""'])]


def _closed(schema: Schema) -> Schema:
    """Return the schema of an object, closed to properties that it does not name unless it allows them."""
    closed = {"type": "object", **schema}
    if "additionalProperties" not in closed and not {"anyOf", "oneOf", "allOf", "$ref"} & closed.keys():
        closed["additionalProperties"] = False
    return closed


def _json(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT})


def _mark(marker: str, token: Token) -> str:
    number = token(marker)
    return _text(marker) if number is None else f"<[{number}]>"


def _text(text: str) -> str:
    return json.dumps(text)
