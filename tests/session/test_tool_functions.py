"""Functions become JSON schemas, from their signatures and docstrings; arguments come back as what they ask for."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import functools
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict

import pytest

from rekindle._src.calls.tool_functions import NoJsonSchema, convert, function_tool, read_docstring, schema_of
from rekindle.errors import InvalidRequest


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@dataclasses.dataclass
class Place:
    city: str
    unit: Unit = Unit.CELSIUS
    near: list[Place] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Spot:
    city: str
    unit: Unit = Unit.CELSIUS


class Row(TypedDict):
    name: str
    age: NotRequired[int]


class Point(NamedTuple):
    x: float
    y: float = 0.0


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (list, {"type": "array"}),
        (collections.abc.Sequence[str], {"type": "array", "items": {"type": "string"}}),
        (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (dict, {"type": "object"}),
        (int | None, {"type": ["integer", "null"]}),
        (Optional[list[int]], {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}),  # noqa: UP045
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal["a", 1], {"type": ["string", "integer"], "enum": ["a", 1]}),
        (Unit, {"type": "string", "enum": ["celsius", "kelvin"]}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (Annotated[int, {"minimum": 1}], {"type": "integer", "minimum": 1}),
        (datetime.date, {"type": "string", "format": "date"}),
        (Path, {"type": "string"}),
        (
            Spot,
            {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                },
                "required": ["city"],
            },
        ),
        (
            Row,
            {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name"],
            },
        ),
        (
            Point,
            {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]},
        ),
    ],
)
def test_types_have_schemas(kind: Any, schema: dict[str, Any]) -> None:
    assert schema_of(kind) == schema


@pytest.mark.parametrize("kind", [Place, dict[int, str], bytes, type("Odd", (), {}), Literal[b"x"]])
def test_types_without_a_schema_are_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pydantic", raising=False)
    with pytest.raises(NoJsonSchema):
        schema_of(kind)


def weather(city: str, days: Annotated[int, "how many"] = 3, *, unit: Unit = Unit.CELSIUS, note: Any = None) -> str:
    """The weather forecast
    of a city.

    Args:
        city: where; a name
            in English
        unit (Unit): of temperatures.

    Returns:
        A sentence.
    """
    return f"{city} {days} {unit}"


def test_a_function_is_a_tool() -> None:
    tool = function_tool(weather)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather forecast of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where; a name in English"},
                    "days": {"type": "integer", "description": "how many", "default": 3},
                    "unit": {
                        "type": "string",
                        "enum": ["celsius", "kelvin"],
                        "description": "of temperatures.",
                        "default": "celsius",
                    },
                    "note": {"default": None},
                },
                "required": ["city"],
            },
        },
    }
    assert tool.arguments({"city": "Rome", "days": "2", "unit": "kelvin"}) == {
        "city": "Rome",
        "days": 2,
        "unit": Unit.KELVIN,
    }


def test_methods_objects_and_partials_are_tools() -> None:
    class Shop:
        def price(self, item: str) -> float:
            """What it costs."""
            return 1.0

        def __call__(self, item: str) -> bool:
            """Whether it is there."""
            return True

    tool = function_tool(Shop().price)
    assert tool.name == "price" and tool.schema["function"]["description"] == "What it costs."
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["item"]
    tool = function_tool(Shop())
    assert tool.name == "Shop" and list(tool.schema["function"]["parameters"]["properties"]) == ["item"]
    tool = function_tool(functools.partial(weather, days=1))
    assert tool.name == "weather"
    assert tool.schema["function"]["parameters"]["properties"]["days"]["default"] == 1


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(x, /): ...", "takes 'x' by position"),
        ("def f(*x): ...", "takes 'x' by position"),
        ("def f(x: bytes): ...", "has a parameter 'x' without a JSON schema: bytes"),
        ("def f(x: 'Missing'): ...", "has no signature that can be read"),
    ],
)
def test_functions_that_a_model_cant_call_are_refused(
    source: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pydantic", raising=False)
    found: dict[str, Any] = {}
    exec(source, found)
    with pytest.raises(InvalidRequest, match=problem):
        function_tool(found["f"])


def test_a_function_without_types_is_a_tool() -> None:
    def f(x, y=2, **more): ...  # type: ignore[no-untyped-def]

    assert function_tool(f).schema["function"] == {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"x": {}, "y": {"default": 2}}, "required": ["x"]},
    }


NUMPY = """Add numbers.

Parameters
----------
a, b : int
    What to add.
c
    More.

Returns
-------
int
"""
SPHINX = """Add numbers.

:param a: the first
    of two
:param int b: the second
:returns: the sum
"""


def test_docstrings_in_three_styles() -> None:
    def documented(text: str | None) -> object:
        def f() -> None: ...

        f.__doc__ = text
        return f

    assert read_docstring(documented(NUMPY)) == (
        "Add numbers.",
        {"a": "What to add.", "b": "What to add.", "c": "More."},
    )
    assert read_docstring(documented(SPHINX)) == ("Add numbers.", {"a": "the first of two", "b": "the second"})
    assert read_docstring(documented(None)) == ("", {})
    assert read_docstring(documented("Note: it is slow.")) == ("Note: it is slow.", {})


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        (int, "3", 3),
        (int, 3.0, 3),
        (int, 2.5, 2.5),
        (float, 3, 3.0),
        (bool, "true", True),
        (str, 3, 3),
        (Any, [1], [1]),
        (int | None, None, None),
        (int | str, "3", "3"),
        (list[Unit], ["celsius"], [Unit.CELSIUS]),
        (set[int], [1, 1], {1}),
        (tuple[int, str], ["1", "a"], (1, "a")),
        (dict[str, Unit], {"a": "kelvin"}, {"a": Unit.KELVIN}),
        (Spot, {"city": "Rome", "unit": "kelvin"}, Spot("Rome", Unit.KELVIN)),
        (Row, {"name": "a", "age": "3"}, {"name": "a", "age": 3}),
        (Point, {"x": 1}, Point(1.0, 0.0)),
        (datetime.date, "2026-11-21", datetime.date(2026, 11, 21)),
        (uuid.UUID, "12345678123456781234567812345678", uuid.UUID("12345678123456781234567812345678")),
        (Path, "a/b", Path("a/b")),
        (Annotated[Unit, "x"], "kelvin", Unit.KELVIN),
    ],
)
def test_arguments_are_converted(kind: Any, value: Any, wanted: Any) -> None:
    found = convert(kind, value)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("kind", "value"), [(Unit, "rankine"), (int, "many"), (Spot, {"town": "Rome"}), (int | None, "x")]
)
def test_arguments_that_contradict_the_types_raise(kind: Any, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        convert(kind, value)


def test_pydantic_is_used_where_it_is_there() -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")
    model = pydantic.create_model("Order", item=(str, ...), count=(int, 1))
    schema = schema_of(model)
    assert schema["properties"]["count"]["type"] == "integer" and schema["required"] == ["item"]
    assert convert(model, {"item": "tea", "count": "2"}).count == 2
    assert schema_of(bytes) == {"format": "binary", "type": "string"}


def test_tools_import_nothing_heavy() -> None:
    assert "pydantic" not in vars(sys.modules["rekindle._src.calls.tool_functions"])
