"""Values and strings of a JSON text are found in blocks of any size as a plain loop finds them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.core import json_values
from rekindle._src.core.json_values import count_values, quotes_of
from rekindle._src.models.loading import tensor_files


def plain(text: str) -> tuple[list[int], int, int]:
    """The places of quotes, and the numbers of values and names."""
    quotes, values, names, inside, escaped = list[int](), 0, 0, False, False
    for place, character in enumerate(text):
        if character == '"' and not (inside and escaped):
            quotes.append(place)
            inside = not inside
        elif not inside:
            values += character in ",:[{"
            names += character == ":"
        escaped = inside and not escaped and character == "\\"
    return quotes, values, names


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_strings_and_values_are_found_in_blocks_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "BLOCK", size)
    draw = random.Random(size)

    def value(depth: int) -> Any:
        kind = draw.randrange(3 if depth else 6)
        if kind < 3:
            return draw.choice([1.5, None, "".join(draw.choices('a,:[{"\\\n', k=draw.randrange(12)))])
        several = [value(depth + 1) for _ in range(draw.randrange(5))]
        return several if kind == 3 else {str(index) + '\\"' * index: one for index, one in enumerate(several)}

    for _ in range(100):
        text = json.dumps(value(0))
        quotes, values, names = plain(text)
        assert quotes_of(text.encode()).tolist() == quotes
        assert count_values(text.encode(), -1, -1).values >= 0, "it stops at once"
        counts = count_values(text.encode(), values, names)
        assert counts == (values, names) or (counts.values <= values and counts.names <= names)
        if values:
            assert count_values(text.encode(), values - 1, names).values > values - 1


def test_a_text_without_a_string_has_no_quotes() -> None:
    assert quotes_of(b"").tolist() == [] == quotes_of(b"[1, 2]").tolist()
    assert count_values(b"[1, 2]", 10, 10) == (2, 0)


def texts() -> st.SearchStrategy[Any]:
    long = st.sampled_from(["a" * 40, "b" * 50 + ",:[{", "c" * 40 + '"', "d" * 40 + "\\", "é" * 40, "short", ""])
    return st.recursive(
        st.none() | st.integers() | long,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(long, inner, max_size=4),
    )


@given(value=texts(), ascii_only=st.booleans())
def test_long_strings_are_the_same_strings_afterwards(value: Any, ascii_only: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(json_values, "LONG_STRING", 32)
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert json_values.parse_with_long_strings(data, most_values=1000, most_text=10_000) == value


def test_long_strings_do_not_count_and_all_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "LONG_STRING", 1000)
    parse = json_values.parse_with_long_strings
    picture = "A" * 100_000
    assert parse(json.dumps([picture, {"a": picture}]).encode(), most_values=10, most_text=200) == [
        picture, {"a": picture},
    ]  # fmt: skip
    for text in ("é" * 1000, "\n" * 1000, " ".join(["word"] * 300)):
        with pytest.raises(json_values.TooMuchJson, match="bytes of text; at most 200 are read"):
            parse(json.dumps([picture, text, *["b" * 90] * 3]).encode(), most_values=10_000, most_text=200)
    for text in (b"[" + b"[]," * 50 + b"[]]", b"[" + b'"",' * 500 + b"[]]"):
        with pytest.raises(json_values.TooMuchJson, match="more than 10 values"):
            parse(text, most_values=10, most_text=10_000)
    for broken in (b'["' + b"a" * 2000, b'["' + b"a" * 2000 + b'" "', b"[" * 100_000, b'"\xff"'):
        with pytest.raises((ValueError, RecursionError)):
            parse(broken, most_values=1 << 20, most_text=1 << 20)


def test_what_is_counted_is_what_is_parsed() -> None:
    """A character of UTF-16 may have the byte of a quote in it, after which everything seemed to be a string."""
    text = ('["\u0122",' + "[]," * 2000 + "[]]").encode("utf-16-le")
    assert count_values(text, 1000, 1000).values < 1000 < len(json.loads(text))
    with pytest.raises(ValueError):
        json_values.parse_with_long_strings(text, most_values=1000, most_text=1 << 20)
    with pytest.raises(ValueError):
        tensor_files._parsed(text, 1000)
