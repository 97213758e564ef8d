"""The structure that a request wants of its text, as a value that can be compared, kept and compiled."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any, Literal

from rekindle._src.core.sampling import Sampling
from rekindle._src.core.structure_checks import check_size
from rekindle._src.structured.schemas import type_schema
from rekindle.errors import InvalidRequest, MissingExtra

Kind = Literal["schema", "regex", "choice", "grammar", "json"]
ANY_OBJECT = '{"type":"object"}'
_PREFIXES = re.compile(r"(?m)^[?!]{1,2}(?=[a-z_]\w*(\.-?\d+)?\s*:(?!:))")  # of Lark's rules; they shape a parse tree


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """Equal specs compile to equal grammars."""

    kind: Kind
    text: str  # a schema or choices as JSON
    lenient: bool = False
    whitespace_flexible: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A request's spec, and the function that makes an object of its whole text."""

    spec: Spec
    parse: Callable[[str], Any]


def structure_of(sampling: Sampling) -> Structure | None:
    """Return the structure of a request's text; None if the text is free.

    Raises `InvalidRequest` for a type that can't be described as a JSON schema, and `MissingExtra` without llguidance.
    """
    if not sampling.structured:
        return None
    require()
    options = {"lenient": sampling.lenient, "whitespace_flexible": sampling.whitespace_flexible}
    if sampling.schema is not None:
        schema, parse, checks = type_schema(sampling.schema)
        options["lenient"] |= checks
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest("schema", schema, f"is not JSON: {error}", "Use dicts, lists, text, numbers") from None
        check_size("schema", len(text))
        return Structure(Spec("schema", text, **options), parse)
    if sampling.json:
        return Structure(Spec("json", ANY_OBJECT, **options), json.loads)
    if sampling.regex is not None:
        return Structure(Spec("regex", sampling.regex), str)
    if sampling.grammar is not None:
        return Structure(Spec("grammar", _PREFIXES.sub("", sampling.grammar)), str)
    return Structure(Spec("choice", json.dumps(sampling.choice)), str)


def require() -> None:
    """Raise `MissingExtra` unless llguidance is installed; it is not imported."""
    if importlib.util.find_spec("llguidance") is None:
        raise MissingExtra("llguidance", "structured")
