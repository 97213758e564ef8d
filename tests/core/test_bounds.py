"""What is too much is refused with its field and its size, before anything of that size is made."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle._src.calls.prompts import parse, parse_one
from rekindle._src.core.options import MAX_N, MAX_PROMPT, MAX_SEQUENCES, MAX_STOP_CHARACTERS, MAX_STOPS, check_batch
from rekindle._src.core.sampling import Sampling
from rekindle._src.structured import spec
from rekindle._src.structured.spec import structure_of
from rekindle.errors import InvalidRequest


class Endless:
    """An iterable without a length or an end."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.entry)


class Huge(dict[int, float]):
    """Says that it has many entries, and can't be copied."""

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Any:
        raise AssertionError("it was copied before it was refused")

    keys = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 200_000_000}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": MAX_N + 1}, "n"),
        ({"stop": [f"stop {index}" for index in range(10_000)]}, "stop"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": Endless("x")}, "stop"),
        ({"stop": "x" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
        ({"stop": ["x" * (MAX_STOP_CHARACTERS // 2), "y" * (MAX_STOP_CHARACTERS // 2 + 1)]}, "stop"),
        ({"stop_token_ids": Endless(5)}, "stop_token_ids"),
        ({"stop_token_ids": range(10**9)}, "stop_token_ids"),
        ({"logit_bias": Huge()}, "logit_bias"),
        ({"processors": Endless("p")}, "processors"),
        ({"taps": Endless("t")}, "taps"),
        ({"steer": Endless("s")}, "steer"),
    ],
)
def test_options_that_are_too_much_are_refused_before_they_cost_memory(options: dict[str, Any], field: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            Sampling(**options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field == field
    assert peak < 1 << 20, f"{peak:,} bytes were made before the refusal"


def test_the_bounds_themselves_are_accepted() -> None:
    half = MAX_STOP_CHARACTERS // MAX_STOPS
    options = Sampling(
        n=MAX_N, stop=[f"{index:{half}}" for index in range(MAX_STOPS)], logit_bias=dict.fromkeys(range(300), 1)
    )
    assert (options.n, len(options.stop), len(options.logit_bias)) == (MAX_N, MAX_STOPS, 300)
    assert Sampling(stop=iter(("a", "b"))).stop == ("a", "b")  # type: ignore[arg-type]
    assert Sampling(stop="x" * MAX_STOP_CHARACTERS).stop == ("x" * MAX_STOP_CHARACTERS,)


def test_prompts_and_batches_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="8,388,609 characters"):
        parse_one("x" * (MAX_PROMPT + 1))
    with pytest.raises(InvalidRequest, match="token ids"):
        parse_one(range(MAX_PROMPT + 1))
    with pytest.raises(InvalidRequest, match="131,073 prompts with n=1"):
        parse(["x"] * (MAX_SEQUENCES + 1))
    with pytest.raises(InvalidRequest, match="3 prompts with n=65,536"):
        check_batch(3, MAX_SEQUENCES // 2)
    check_batch(2, MAX_SEQUENCES // 2)
    assert len(parse(["x"] * 1000)[0]) == 1000


def test_a_schema_is_counted_before_it_is_written_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a million numbers as text took a quarter of a second, for which nothing else ran."""
    pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
    small, large = {"enum": [1.5] * 1000}, {"enum": [[1.5] * 300_000, {"a": ["x"] * 150_000}]}
    assert structure_of(Sampling(schema=small)) is not None
    circular: dict[str, Any] = {"type": "array"}
    circular["items"] = circular
    monkeypatch.setattr(spec, "json", SimpleNamespace(loads=json.loads))  # writing would be an AttributeError
    for schema in (large, circular, {"x" * (1 << 19): {}}):
        with pytest.raises(InvalidRequest, match=r"schema=.*is over the 524,288 characters that are possible"):
            structure_of(Sampling(schema=schema))
