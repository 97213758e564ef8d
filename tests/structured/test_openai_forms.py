"""Fields of OpenAI's and vLLM's requests become our options, or are refused by their own names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import Sampling
from rekindle._src.structured.openai_forms import structure_options
from rekindle.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"response_format": None}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
         {"schema": SCHEMA}),
        ({"response_format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, {"schema": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"schema": SCHEMA}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"schema": {"type": "null"}}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
         {"schema": SCHEMA, "whitespace_flexible": True}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "root ::= x"}}, {"grammar": "root ::= x"}),
        ({"structured_outputs": {"json_object": True}}, {"json": True}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_json": SCHEMA, "guided_regex": None}, {"schema": SCHEMA}),
    ],
)  # fmt: skip
def test_forms_become_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert structure_options(fields) == options
    Sampling.of(None, options)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_forms_that_can_not_be_followed_name_their_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        structure_options(fields)
    assert caught.value.field == field


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "json_schema", "schema", "json", "regex", "choice"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(st.sampled_from(["response_format", "structured_outputs", "guided_json"]), ANY)
def test_any_json_is_taken_or_refused(field: str, value: Any) -> None:
    try:
        options = structure_options({field: value})
        Sampling.of(None, options)
    except InvalidRequest:
        pass
