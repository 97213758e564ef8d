"""The structure that a request wants of its text, as a value that can be compared, kept and compiled.

A type becomes a JSON schema, and a function that makes objects of the type from JSON: with pydantic, any type that its
TypeAdapter takes; without it, dataclasses, TypedDicts and plain annotations, which `schema_of` converts. The objects of
a type are closed: the grammar allows no properties beyond its fields, which would be thrown away. Rules that it can't
express, such as that the items of a set differ, are left out, since building the object checks them.
"""

from __future__ import annotations

import dataclasses
import decimal
import enum
import functools
import importlib.util
import json
import pathlib
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, Union, get_args, get_origin

from rekindle._src.core.sampling import Sampling, check_json, check_size
from rekindle.errors import InvalidRequest, MissingExtra

Kind = Literal["schema", "regex", "choice", "grammar", "json"]
ANY_OBJECT = '{"type":"object"}'
_PREFIXES = re.compile(r"(?m)^[?!]{1,2}(?=[a-z_]\w*(\.-?\d+)?\s*:(?!:))")  # of Lark's rules; they shape a parse tree

_DATA = frozenset(("const", "enum", "default", "examples", "example", "discriminator"))  # hold values, not schemas
_BASE64 = {
    name: f"^([{letters}]{{4}})*([{letters}]{{2}}==|[{letters}]{{3}}=)?$"
    for name, letters in (("base64", "A-Za-z0-9+/"), ("base64url", "A-Za-z0-9_-"))
}
_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    decimal.Decimal: {"type": "number"},
    pathlib.Path: {"type": "string"},
    bytes: {"type": "string"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    Any: {},
    list: {"type": "array"},
    dict: {"type": "object"},
}
_LISTS = (list, Sequence, set, frozenset)
_DICTS = (dict, Mapping)
_MOST_LEVELS = 16
_NAMED = frozenset(("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"))


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
    parse: Callable[[str], object]


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
        check_json("schema", schema)
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


class TypeSchema(NamedTuple):
    """A JSON schema, and the function from a text that follows it to an object."""

    schema: Mapping[str, Any]
    parse: Callable[[str], object]
    checks: bool = False  # True if `parse` refuses texts that break the schema


def type_schema(schema: Any) -> TypeSchema:
    """Return the JSON schema of a type. A dict is a schema already; its texts are parsed with `json.loads`."""
    if isinstance(schema, Mapping):
        return TypeSchema(schema, json.loads)
    try:
        return _cached_type_schema(schema)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _type_schema(schema)  # such as Annotated[int, […]]


@functools.lru_cache(maxsize=256)
def _cached_type_schema(kind: Any) -> TypeSchema:
    return _type_schema(kind)


def _type_schema(kind: Any) -> TypeSchema:
    problem = "with pydantic installed more types are possible"
    if importlib.util.find_spec("pydantic") is not None:
        import pydantic

        try:
            adapter = pydantic.TypeAdapter(kind)
            # The model writes the input of a validator: aliases, and no computed fields.
            schema = adapter.json_schema(mode="validation", schema_generator=_generator())
            return TypeSchema(closed(schema), adapter.validate_json, checks=True)
        except Exception as error:  # classes of users take part in it, and may raise anything
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
    try:
        schema = closed(schema_of(kind))  # also before Python 3.12, where pydantic refuses TypedDicts
    except Exception as error:
        fix = "Pass its JSON schema as a dict, or a type with values that JSON can express"
        raise InvalidRequest("schema", kind, f"has no JSON schema: {error} ({problem})", fix) from None
    return TypeSchema(schema, lambda text: build(kind, json.loads(text)), checks=True)


@functools.cache
def _generator() -> Any:
    """Return pydantic's schema generator, but with Decimals as numbers only, where pydantic allows any text as well."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):  # type: ignore[misc,unused-ignore]
        def decimal_schema(self, schema: Any) -> Any:
            written = super().decimal_schema(schema)
            return next((part for part in written.get("anyOf", ()) if part.get("type") == "number"), written)

    return Generator


def closed(schema: Any) -> Any:
    """Return a type's schema in the form that grammars take.

    Objects with named properties get additionalProperties false unless they mention it. oneOf, which pydantic writes
    for unions that a field tells apart, becomes anyOf: building the object checks the rest. Keys that are of an
    enumeration become optional properties, and base64 a pattern.
    """
    return _closed(schema, (schema.get("$defs") or {}) if isinstance(schema, Mapping) else {})


def _closed(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_closed(part, definitions) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _NAMED and isinstance(part, Mapping):
            result[name] = {inner: _closed(value, definitions) for inner, value in part.items()}
        else:
            result["anyOf" if name == "oneOf" else name] = part if name in _DATA else _closed(part, definitions)
    names = result.get("propertyNames")
    if isinstance(names, Mapping) and "properties" not in result:
        keys = definitions.get(str(names.get("$ref", "")).removeprefix("#/$defs/"), names).get("enum", ())
        if keys and all(isinstance(key, str) for key in keys):
            del result["propertyNames"]
            result["properties"] = dict.fromkeys(keys, result.pop("additionalProperties", {}))
    if "properties" in result and result.get("type") == "object":
        result.setdefault("additionalProperties", False)
    if result.get("type") == "string" and result.get("format") in _BASE64:
        result.setdefault("pattern", _BASE64[result.pop("format")])
    return result


class NoSchema(TypeError):
    """A type that can't be converted."""


def schema_of(kind: Any, level: int = 0) -> dict[str, Any]:
    """Return the JSON schema of an annotation. Raises `NoSchema`, which names the part without one."""
    if level > _MOST_LEVELS:
        raise NoSchema("it contains itself, or is nested too deeply")
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Annotated, Required, NotRequired):
        return schema_of(arguments[0], level)
    if origin is None and isinstance(kind, typing.Hashable) and kind in _SCALARS:
        return dict(_SCALARS[kind])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(argument, level + 1) for argument in arguments]}
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return {"type": "array", "items": schema_of(arguments[0], level + 1)}
        parts = [schema_of(argument, level + 1) for argument in arguments]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if origin in _LISTS:
        return {"type": "array", "items": schema_of(arguments[0], level + 1)}
    if origin in _DICTS and arguments[0] is str:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], level + 1)}
    if origin in _DICTS and (keys := schema_of(arguments[0], level + 1).get("enum")):
        return {"type": "object", "properties": {str(key): schema_of(arguments[1], level + 1) for key in keys}}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)):
        hints, required = _fields(kind)
        properties = {name: schema_of(hint, level + 1) for name, hint in hints.items()}
        return {"type": "object", "properties": properties, "required": required}
    raise NoSchema(f"{kind!r} is not a dataclass, a TypedDict or a plain annotation")


def build(kind: Any, value: Any) -> Any:
    """Build an object of `kind` from the parsed JSON of a text that follows its schema."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Annotated, Required, NotRequired):
        return build(arguments[0], value)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            try:
                return build(argument, value)
            except (TypeError, ValueError):
                continue
        raise ValueError(f"{value!r} fits no member of {kind}")
    if origin is tuple and isinstance(value, list):
        kinds = (arguments[0],) * len(value) if len(arguments) == 2 and arguments[1] is ... else arguments
        return tuple(build(argument, part) for argument, part in zip(kinds, value, strict=True))
    if origin in _LISTS and isinstance(value, list):
        items = [build(arguments[0], part) for part in value]
        return items if origin in (list, Sequence) else origin(items)
    if origin in _DICTS and isinstance(value, dict):
        return {build(arguments[0], name): build(arguments[1], part) for name, part in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)):
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not an object")
        hints, required = _fields(kind)
        if missing := set(required) - set(value):
            raise ValueError(f"{sorted(missing)} are missing")
        return kind(**{name: build(hints[name], part) for name, part in value.items()})
    if kind is decimal.Decimal and isinstance(value, int | float) and not isinstance(value, bool):
        return decimal.Decimal(str(value))
    if kind in (pathlib.Path, bytes) and isinstance(value, str):
        return pathlib.Path(value) if kind is pathlib.Path else value.encode()
    if origin is Literal:
        fits = any(type(argument) is type(value) and argument == value for argument in arguments)
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    elif kind in (int, str, bool, list, dict):
        fits = type(value) is kind
    else:
        fits = kind is Any or value is None
    if not fits:
        raise ValueError(f"{value!r} is not of {kind}")
    return float(value) if kind is float else value


def _fields(kind: type) -> tuple[dict[str, Any], list[str]]:
    """Return annotations by name, and the names that have to be there."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if not dataclasses.is_dataclass(kind):
        return hints, [name for name in hints if name in kind.__required_keys__]  # type: ignore[attr-defined]
    fields = [field for field in dataclasses.fields(kind) if field.init]
    absent = dataclasses.MISSING
    required = [field.name for field in fields if field.default is absent and field.default_factory is absent]
    return {field.name: hints[field.name] for field in fields}, required
