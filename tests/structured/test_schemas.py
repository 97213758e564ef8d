"""Types become JSON schemas, and texts become their objects, with pydantic and without it."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import importlib.util
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import pytest

from rekindle import Sampling, tiny
from rekindle._src.core.records import GuideReport
from rekindle._src.structured import spec
from rekindle._src.structured.grammar import Grammars
from rekindle._src.structured.spec import Spec, closed, structure_of, type_schema
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest, MissingExtra

TOKENIZER = Tokenizer.load(tiny.folder())
GRAMMARS = Grammars(TOKENIZER, 2048)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Address:
    street: str
    number: int = 1


@dataclasses.dataclass
class Person:
    name: str
    ages: list[int]
    colour: Colour
    address: Address
    nick: str | None = None
    pair: tuple[int, str] = (0, "")
    kind: Literal["a", "b"] = "a"


class Movie(TypedDict, total=False):
    title: str
    year: int


TEXT = json.dumps(
    {"name": "Tom", "ages": [1, 2], "colour": "blue", "address": {"street": "x"}, "nick": None, "pair": [3, "y"]}
)
PERSON = Person("Tom", [1, 2], Colour.BLUE, Address("x"), None, (3, "y"))


@pytest.fixture(params=["pydantic", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With pydantic, and as if it was not installed."""
    if request.param == "pydantic":
        pytest.importorskip("pydantic")
    else:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pydantic" else find(name))
    spec._cached_type_schema.cache_clear()
    return str(request.param)


def test_a_dataclass_comes_back_as_an_object(way: str) -> None:
    schema, parse, _ = type_schema(Person)
    assert schema["required"] == ["name", "ages", "colour", "address"]
    assert schema["additionalProperties"] is False
    assert parse(TEXT) == PERSON


def test_a_typed_dict_and_annotations(way: str) -> None:
    schema, parse, _ = type_schema(Movie)
    assert set(schema["properties"]) == {"title", "year"} and not schema.get("required")
    assert parse('{"title": "x"}') == {"title": "x"}
    for kind, text, value in [
        (list[int], "[1, 2]", [1, 2]),
        (dict[str, float], '{"a": 1}', {"a": 1.0}),
        (int | str, '"x"', "x"),
        (Literal["a", 3], "3", 3),
        (tuple[int, ...], "[1, 2]", (1, 2)),
        (Annotated[int, "a number"], "3", 3),
        (Sequence[bool], "[true]", [True]),
        (Mapping[str, int], '{"a": 1}', {"a": 1}),
        (Colour, '"red"', Colour.RED),
    ]:
        schema, parse, _ = type_schema(kind)
        assert parse(text) == value, (kind, schema)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (set[int], "[1,2,1]", {1, 2}),
        (dict[Colour, int], '{"red":1}', {Colour.RED: 1}),
        (bytes, '"abc"', b"abc"),
        (pathlib.Path, '"a/b"', pathlib.Path("a/b")),
        (decimal.Decimal, "-0.25", decimal.Decimal("-0.25")),
    ],
)
def test_types_that_a_grammar_does_not_know_are_checked_as_they_are_built(
    way: str, kind: Any, text: str, value: Any
) -> None:
    structure = structure_of(Sampling(schema=kind))
    assert structure is not None and structure.spec.lenient
    assert structure.parse(text) == value and fits(structure.spec, text)
    if kind is decimal.Decimal:
        assert not fits(structure.spec, '"a"') and not fits(structure.spec, "true")
    if kind == dict[Colour, int]:
        assert not fits(structure.spec, '{"green":1}') and not fits(structure.spec, '{"red":"x"}')


def test_types_of_pydantic_that_a_grammar_does_not_know() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Account(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        key: pydantic.SecretStr
        data: pydantic.Base64Str
        limits: dict[Colour, decimal.Decimal]
        since: datetime.date

    structure = structure_of(Sampling(schema=Account))
    assert structure is not None
    text = '{"key":"x","data":"aGk=","limits":{"blue":1.5},"since":"2026-01-02"}'
    account = structure.parse(text)
    assert fits(structure.spec, text) and account.data == "hi" and account.key.get_secret_value() == "x"
    assert account.limits == {Colour.BLUE: decimal.Decimal("1.5")}
    assert not fits(structure.spec, text.replace("aGk=", "aGk")) and not fits(
        structure.spec, text.replace("1.5", '"x"')
    )
    assert not fits(structure.spec, text.replace("2026", "x")), "formats that a grammar knows are kept to"


def fits(spec: Spec, text: str) -> bool:
    """Whether the grammar of a spec takes the whole text."""
    guide = GRAMMARS.compile(spec).guide(frozenset(TOKENIZER.eos_ids))
    told = GuideReport()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        told = guide.consume(token)
        if told.problem:
            return False
    return told.accepting


@pytest.mark.parametrize("kind", [memoryview, type("Odd", (), {"__init__": lambda self, x: None})])
def test_types_without_a_schema_are_refused(way: str, kind: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        type_schema(kind)
    assert caught.value.field == "schema"


def test_what_does_not_validate_is_an_error(way: str) -> None:
    with pytest.raises(ValueError):  # pydantic's and our own
        type_schema(Person).parse('{"name": 3}')


def test_a_pydantic_model_with_constraints_and_a_discriminator() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Cat(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        kind: Literal["cat"]
        lives: Annotated[int, pydantic.Field(ge=1, le=9)]

    class Dog(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        kind: Literal["dog"]

    schema, parse, _ = type_schema(Annotated[Cat | Dog, pydantic.Field(discriminator="kind")])
    assert "oneOf" not in schema and len(schema["anyOf"]) == 2
    assert parse('{"kind": "cat", "lives": 3}') == Cat(kind="cat", lives=3)


def test_dicts_are_schemas_as_they_are() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert type_schema(schema) == (schema, json.loads, False)


def test_closing_leaves_values_alone() -> None:
    given = {
        "type": "object",
        "properties": {"oneOf": {"oneOf": [{"const": {"type": "object", "properties": 1}}]}},
        "default": {"type": "object", "properties": {}},
    }
    assert closed(given) == {
        "type": "object",
        "properties": {"oneOf": {"anyOf": [{"const": {"type": "object", "properties": 1}}]}},
        "default": {"type": "object", "properties": {}},
        "additionalProperties": False,
    }


def test_a_type_that_contains_itself_needs_pydantic() -> None:
    with pytest.raises(spec.NoSchema, match="contains itself"):
        spec.schema_of(Node)


@dataclasses.dataclass
class Node:
    next: Node | None


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"rekindle\[structured\]"):
        structure_of(Sampling(regex="a"))
    assert structure_of(Sampling()) is None


@pytest.mark.parametrize("schema", [{"enum": [float("nan")]}, {"enum": [object()]}, {"enum": [{1, 2}]}])
def test_what_is_no_json_is_refused(schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(InvalidRequest, match="is not JSON") as caught:
        structure_of(Sampling(schema=schema))
    assert caught.value.field == "schema"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"schema": 3}, "schema"), ({"schema": "{}"}, "schema"), ({"regex": ""}, "regex"), ({"regex": 3}, "regex"),
        ({"choice": [1]}, "choice"), ({"choice": [""]}, "choice"), ({"grammar": b"x"}, "grammar"),
        ({"json": 1}, "json"),
        ({"regex": "a", "choice": ["a"]}, "choice"), ({"schema": {}, "json": True}, "json"),
        ({"lenient": True}, "lenient"),
        ({"regex": "a", "lenient": True}, "lenient"), ({"whitespace_flexible": True}, "whitespace_flexible"),
        ({"choice": ["x"], "whitespace_flexible": True}, "whitespace_flexible"), ({"regex": "a" * 600_000}, "regex"),
        ({"choice": ["a" * 300_000, "b" * 300_000]}, "choice"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Sampling(**options)
    assert caught.value.field == field
