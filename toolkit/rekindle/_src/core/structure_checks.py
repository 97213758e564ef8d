"""Checks the options for a text's structure, as far as that is possible without a tokenizer.

Compiling, in `structured`, decides if a schema or grammar can be followed.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Protocol

from rekindle.errors import InvalidRequest

KINDS = ("schema", "regex", "choice", "grammar", "json")
MAX_CHARACTERS = 1 << 19  # of a regular expression, a grammar, all choices or a schema as text


class Structure(Protocol):
    """The options of `Sampling` that define the structure of its text."""

    @property
    def schema(self) -> Any: ...
    @property
    def regex(self) -> str | None: ...
    @property
    def choice(self) -> tuple[str, ...] | None: ...
    @property
    def grammar(self) -> str | None: ...
    @property
    def json(self) -> bool: ...
    @property
    def lenient(self) -> bool: ...
    @property
    def whitespace_flexible(self) -> bool: ...


def check_structure(structure: Structure) -> None:
    """Raise InvalidRequest for values of a wrong type and for options that exclude each other."""
    if structure.schema is not None and not (isinstance(structure.schema, Mapping) or is_type(structure.schema)):
        raise InvalidRequest(
            "schema",
            structure.schema,
            "is neither a JSON schema nor a type",
            "Pass a dict, a dataclass or a pydantic model",
        )
    for name in ("regex", "grammar"):
        text = getattr(structure, name)
        if text is not None and (not isinstance(text, str) or not text):
            raise InvalidRequest(name, text, "is not text, or is empty", "Pass a str, or leave it out")
        check_size(name, len(text or ""))
    for text in structure.choice or ():
        if not isinstance(text, str) or not text:
            raise InvalidRequest(
                "choice", structure.choice, "holds something other than non-empty strings", "Remove it"
            )
    check_size("choice", sum(map(len, structure.choice or ())))
    kinds = [name for name in KINDS if getattr(structure, name) not in (None, False)]
    if len(kinds) > 1:
        raise InvalidRequest(
            kinds[1], getattr(structure, kinds[1]), f"can't be combined with {kinds[0]}", "Pass one of them"
        )
    if structure.lenient and kinds != ["schema"]:
        raise InvalidRequest("lenient", True, "means nothing without a schema", "Leave it out")
    if structure.whitespace_flexible and kinds not in (["schema"], ["json"]):
        raise InvalidRequest("whitespace_flexible", True, "means nothing without schema or json", "Leave it out")


def check_size(name: str, characters: int) -> None:
    """Raise InvalidRequest for a text that would take too long to compile."""
    if characters > MAX_CHARACTERS:
        raise InvalidRequest(
            name, f"{characters:,} characters", f"is over the {MAX_CHARACTERS:,} that are possible", "Use a smaller one"
        )


def is_type(value: Any) -> bool:
    """True if `value` can be an annotation: a class, or a form such as `list[int]` or `A | B`."""
    forms = (type, types.GenericAlias, types.UnionType)
    return isinstance(value, forms) or (type(value).__module__ == "typing" and typing.get_origin(value) is not None)
