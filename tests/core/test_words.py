"""Numbers in words."""

from __future__ import annotations

from rekindle._src.core import words


def test_one_is_singular() -> None:
    assert [words.count(amount, "token") for amount in (0, 1, 2, 1000)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "1,000 tokens",
    ]


def test_units() -> None:
    assert [words.seconds(value) for value in (0.0, 2e-5, 0.0037, 1.25)] == ["0 ms", "20 µs", "3.7 ms", "1.25 s"]
    assert words.mebibytes(41_984_000) == "40.0 MiB"


def test_a_share_that_rounds_to_zero_is_no_zero() -> None:
    assert [words.share(part) for part in (0.0, 1e-5, 0.0005, 0.123)] == ["0.0%", "<0.1%", "0.1%", "12.3%"]


def test_a_long_text_ends_in_an_ellipsis() -> None:
    assert [words.shorten(text, 4) for text in ("", "four", "fives")] == ["", "four", "fiv…"]
