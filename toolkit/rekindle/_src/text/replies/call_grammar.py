"""The grammar of the calls that a model must make, from the form of a family's syntax and the schemas of the tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.core.sampling import check_size
from rekindle._src.text.replies.arguments import kinds_of
from rekindle._src.text.replies.call import KEYWORDS, OBJECT, TAGGED, CallForm, CallSyntax, Token

Schema = Mapping[str, Any]
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_grammar(syntax: CallSyntax, tools: Sequence[Schema], token: Token, *, several: bool) -> str:
    """Return the grammar of one call of these tools, or of `several`, in the syntax of a family."""
    form = syntax.form(token)
    rules = _Rules()
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        call = form.call(function["name"])
        schema = _closed(function.get("parameters") or function.get("input_schema") or {})
        names = {OBJECT: f"args_{index}", KEYWORDS: f"values_{index}", TAGGED: f"values_{index}"}
        rules.add(f"call_{index}: " + " ".join(names.get(part, part) for part in call))
        if OBJECT in call:
            rules.add(f"args_{index}: {_json(schema)}")
        else:
            _add_values(rules, index, schema, form, tagged=TAGGED in call)
    rules.add("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    more = f"({form.between} call)*" if several and syntax.several else ""
    return "\n".join([f"start: {form.begins} call {more} {form.ends}".rstrip(), *rules.texts])


class _Rules:
    """The rules of a grammar. Definitions that values share stand in the rule of each, so their sizes are counted as
    they come: a schema of a megabyte can make a grammar of gigabytes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._characters = 0

    def add(self, *texts: str) -> None:
        """Add rules. Raise `InvalidRequest` once all of them are longer than a grammar may be."""
        self.texts += texts
        self._characters += sum(map(len, texts))
        check_size("tools", self._characters)


def literal(text: str) -> str:
    """Return a text as a part of a rule."""
    return json.dumps(text)


def escaped(text: str) -> str:
    """Return a text as a part of a pattern."""
    return re.sub(r"[^\w\s]", r"\\\g<0>", text)


def mark(marker: str, token: Token) -> str:
    """Return a marker as a part of a rule: its token, or its text without one."""
    number = token(marker)
    return literal(marker) if number is None else f"<[{number}]>"


def object_call(key: str, name: str) -> tuple[str, ...]:
    """Return the parts of `{"name": "f", "arguments": {…}}`, with this key for the arguments."""
    return (literal(f'{{"name": {json.dumps(name)}, "{key}": '), OBJECT, literal("}"))


def _add_values(rules: _Rules, index: int, schema: Schema, form: CallForm, *, tagged: bool) -> None:
    """Add rules for `a=1, b="x"`, or for values in tags: the required ones in their order, then any others."""
    properties: Schema = schema.get("properties") or {}
    needed = {name for name in schema.get("required", ()) if isinstance(name, str)}
    required = [name for name in properties if name in needed]
    optional = [name for name in properties if name not in needed]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for place, name in enumerate([*required, *optional]):
        inner = properties[name]
        value = {**(inner if isinstance(inner, Mapping) else {}), **shared}
        if tagged:
            rules.add(*_tagged(f"{index}_{place}", name, value, form))
        else:
            rules.add(f"value_{index}_{place}: {_json(value)}")
            rules.add(f"item_{index}_{place}: {literal(name + '=')} value_{index}_{place}")
    comma = form.between_tags if tagged else literal(", ")
    parts = [f"item_{index}_{place}" for place in range(len(required))]
    places = range(len(required), len(required) + len(optional))
    if required:
        parts = [f" {comma} ".join(parts), *(f"({comma} item_{index}_{place})?" for place in places)]
        rules.add(f"values_{index}: " + " ".join(parts))
        return
    # Each of them may be the first. Those after it are one chain of rules: written out, they grow with the square.
    rules.add(*(f"more_{index}_{at}: ({comma} item_{index}_{at})? more_{index}_{at + 1}" for at in places[1:]))
    if optional:
        rules.add(f'more_{index}_{len(optional)}: ""')
    choices = [f"item_{index}_{first} more_{index}_{first + 1}" for first in places]
    rules.add(f"values_{index}: " + " | ".join([*choices, '""']))


def _tagged(place: str, name: str, schema: Schema, form: CallForm) -> list[str]:
    """Return rules for a value in tags: a text up to its closing tag, or JSON if the schema allows no text."""
    assert form.tag is not None, "the form of a syntax with tags has them"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    kinds = kinds_of(schema)
    is_text = kinds is None or "string" in kinds
    if isinstance(choices, list) and is_text:
        alternatives = []
        for choice in choices:
            tag = form.tag(name, isinstance(choice, str))
            text = choice if isinstance(choice, str) else json.dumps(choice)
            alternatives.append(f"{tag.before} {literal(text) if text else ''} {tag.after}")
        return [f"item_{place}: " + " | ".join(alternatives)]
    tag = form.tag(name, is_text)
    if not is_text:
        return [f"value_{place}: {_json(schema)}", f"item_{place}: {tag.before} value_{place} {tag.after}"]
    if tag.rest:
        return [
            f"value_{place}: /(?s:.*){escaped(tag.text_ends)}/",
            f"item_{place}: {tag.before} value_{place} {tag.rest}",
        ]
    value = f"value_{place}[suffix={literal(tag.text_ends)}]: /(?s:.*)/"
    return [value, f"item_{place}: {tag.before} value_{place}"]


def _closed(schema: Schema) -> Schema:
    """Return the schema of an object, closed to properties that it does not name unless it allows them."""
    closed = {"type": "object", **schema}
    if "additionalProperties" not in closed and not {"anyOf", "oneOf", "allOf", "$ref"} & closed.keys():
        closed["additionalProperties"] = False
    return closed


def _json(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT})
