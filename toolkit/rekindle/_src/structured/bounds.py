"""Bounds of a grammar that are checked before it is compiled: its depth, and whether it is as simple as most."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Spec

# References and rules that may follow each other. A level takes up to 21 kB of llguidance's stack (an object's property
# that is a reference), and the process that tries it has 16 MiB.
MOST_LEVELS = 500
SIMPLE_CHARACTERS = 8_192
SIMPLE_COUNT = 1_000  # such as minItems: each is a part of the grammar

# Keywords of a schema whose parts are compiled once each, so that a short schema takes a few milliseconds.
_SCHEMAS = frozenset(("items", "additionalProperties"))
_NAMED = frozenset(("properties", "$defs", "definitions"))
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"))
_WORDS = frozenset(("title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly"))
_VALUES = frozenset(("type", "required", "enum", "const"))
_ALONE = frozenset(("anyOf", "$ref"))  # keywords beside them would be merged into each part


def is_simple(spec: Spec) -> bool:
    """True if a grammar surely compiles in milliseconds: it is short, and has nothing that multiplies."""
    if spec.kind == "json":
        return True
    if len(spec.text) > SIMPLE_CHARACTERS or spec.kind not in ("schema", "choice"):
        return False
    return spec.kind == "choice" or _simple(json.loads(spec.text))


def _simple(schema: Any) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, Mapping):
        return False
    structural = schema.keys() - _WORDS - {"$defs", "definitions"}
    if structural & _ALONE and len(structural) > 1:
        return False
    for name, value in schema.items():
        if name in _WORDS or name in _VALUES:
            continue
        if name in _SCHEMAS:
            parts = [value]
        elif name in _NAMED and isinstance(value, Mapping):
            parts = [*value.values()]
        elif name == "anyOf" and isinstance(value, list):
            parts = value
        elif (name == "$ref" and isinstance(value, str)) or (name in _COUNTS and _small(value)):
            continue
        else:
            return False
        if not all(map(_simple, parts)):
            return False
    return True


def _small(value: Any) -> bool:
    return isinstance(value, int) and abs(value) <= SIMPLE_COUNT


def check_levels(spec: Spec) -> None:
    """Raise `InvalidRequest` for a chain of references or rules that might overflow a compiler's stack."""
    if spec.kind == "schema":
        try:
            levels = schema_levels(json.loads(spec.text))
        except RecursionError:
            levels = MOST_LEVELS + 1
        except ValueError:  # a number of too many digits, which llguidance reports itself
            return
        words = "references, each in what the one before refers to,"
    elif spec.kind == "grammar":
        levels, words = rule_levels(spec.text), "rules, each named by the one before,"
    else:
        return
    if levels > MOST_LEVELS:
        raise InvalidRequest(
            spec.kind,
            spec.text,
            f"has a chain of {levels:,} {words} and {MOST_LEVELS} are possible",
            "Use fewer levels; one that refers to itself nests without end",
        )


def schema_levels(schema: Any) -> int:
    """Return the longest chain of nested references, when each is followed at its first occurrence."""
    seen: set[int] = set()
    deepest = 0
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        node, level = pending.pop()
        if id(node) in seen or not isinstance(node, Mapping | list):
            continue
        seen.add(id(node))
        deepest = max(deepest, level)
        following: list[tuple[Any, int]] = []
        if isinstance(node, Mapping):
            following = [(part, level) for name, part in node.items() if name not in ("$defs", "definitions")]
            if isinstance(reference := node.get("$ref"), str):
                following.append((_at(schema, reference), level + 1))
        else:
            following = [(part, level) for part in node]
        pending += reversed(following)
    return deepest


def _at(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a pointer names; None for another kind of reference."""
    head, _, pointer = reference.partition("#")
    if head:
        return None
    node = schema
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdigit() and len(name) < 8 and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


_STRINGS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*')
_GBNF_STRINGS = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*')
_RULE = re.compile(r"[ \t]*[?!]*([A-Za-z_][\w-]*)[^\n:=|]*?:(?::=)?(?!:)")
_NAME = re.compile(r"[A-Za-z_][\w-]*")


def rule_levels(text: str) -> int:
    """Return the longest chain of rules that name each other, when each is followed at its first mention."""
    text = (_GBNF_STRINGS if "::=" in text else _STRINGS).sub(" ", text)
    rules: dict[str, list[str]] = {}
    names: list[str] = []
    for line in text.split("\n"):
        match = _RULE.match(line)
        if match is not None:
            names = rules.setdefault(match[1], [])
            line = line[match.end() :]
        names += _NAME.findall(line)
    seen: set[str] = set()
    deepest = 0
    for first in ("start", "root", *rules):
        levels: list[Iterator[str]] = []
        rule: str | None = first
        while True:
            if rule is not None and rule in rules and rule not in seen:
                seen.add(rule)
                levels.append(iter(rules[rule]))
                deepest = max(deepest, len(levels))
            if not levels:
                break
            rule = next(levels[-1], None)
            if rule is None:
                levels.pop()
    return deepest
