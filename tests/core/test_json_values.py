"""Values and strings of a JSON text are found in blocks of any size as a plain loop finds them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rekindle._src.core import json_values
from rekindle._src.core.json_values import count_values, quotes_of


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
