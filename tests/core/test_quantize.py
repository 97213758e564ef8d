"""The option `quantize`: every way to say a plan, one form for each, and errors that name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.dtypes import QUANTIZE_KINDS, QUANTIZE_PARTS, checked_quantize, kinds_of
from rekindle.errors import ConfigError


@pytest.mark.parametrize("kind", QUANTIZE_KINDS)
def test_a_kind_is_a_plan_for_the_whole_model(kind: str) -> None:
    assert checked_quantize(kind) == kind == EngineConfig(quantize=kind).quantize
    found = kinds_of(kind)
    assert set(found) == set(QUANTIZE_PARTS)
    outer = "int8" if kind.startswith("int4") else kind
    assert [found[part] for part in QUANTIZE_PARTS] == [kind, kind, kind, outer, outer]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, None),
        ({"mlp": "int4", "attention": "int8"}, "attention=int8,mlp=int4"),
        ("mlp=int4, attention=int8", "attention=int8,mlp=int4"),
        ("attention=none,mlp=int4", "mlp=int4"),
        ({"mlp": None}, None),
        ({"head": "int8", "embedding": "int4-32"}, "embedding=int4-32,head=int8"),
    ],
)
def test_plans_that_mean_the_same_have_one_form(given: Any, text: str | None) -> None:
    assert checked_quantize(given) == text
    assert checked_quantize(text) == text
    assert EngineConfig(quantize=given).quantize == text


def test_what_is_not_named_follows_or_stays() -> None:
    assert kinds_of("mlp=int4") == {"mlp": "int4", "experts": "int4"}
    assert kinds_of("mlp=int4,experts=int8") == {"mlp": "int4", "experts": "int8"}
    assert kinds_of("embedding=int8") == {"embedding": "int8", "head": "int8"}
    assert kinds_of(None) == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("int3", "is not known.*'int4'"),
        (4, "is not known"),
        ({"norms": "int8"}, "the part 'norms', which no model has.*'attention'"),
        ({"mlp": "int5"}, "'mlp' is 'int5', which is not known"),
        ({1: "int4"}, "the part 1"),
        ({}, "names no part"),
        ("mlp=int4,mlp=int8", "names a part twice"),
        ("mlp", "is not known"),
        ({"mlp": ["int4"]}, "which is not known"),
    ],
)
def test_anything_else_is_an_error_that_names_it(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        EngineConfig(quantize=given)
    assert "quantize" in str(raised.value)
