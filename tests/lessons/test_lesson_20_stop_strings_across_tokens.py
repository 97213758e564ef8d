"""A stop string that spans several tokens does not leak its first half.

Upstream: https://github.com/vllm-project/vllm/issues/3574
A stream sent the beginning of a stop string before it was complete.
"""

from __future__ import annotations

import pytest

from helpers.vocabularies import of_kind
from rekindle._src.text import Detokenizer

TOKENIZER = of_kind("byte-level")


def stream(text: str, *stop: str) -> tuple[list[str], Detokenizer]:
    """One character per token, as bad as it gets."""
    detokenizer = Detokenizer(TOKENIZER, stop)
    pieces = [detokenizer.push([token]).text for token in TOKENIZER.encode(text)]
    return [*pieces, detokenizer.flush()], detokenizer


def test_the_first_half_is_held_back_until_decided() -> None:
    pieces, detokenizer = stream("ok.\n\nUser: hi", "\n\nUser:")
    assert pieces[:3] == ["o", "k", "."]
    assert "".join(pieces) == "ok."
    assert detokenizer.stopped == "\n\nUser:"


def test_a_false_start_is_delivered() -> None:
    pieces, detokenizer = stream("a\n\nUse it", "\n\nUser:")
    assert "".join(pieces) == "a\n\nUse it"
    assert pieces[5:7] == ["", "\n\nUse "], "delivered as soon as the space decides it"
    assert detokenizer.stopped is None


def test_an_undecided_end_is_delivered_at_the_end() -> None:
    pieces, _ = stream("a\n\nUs", "\n\nUser:")
    assert pieces[-1] == "\n\nUs"


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stopped"),
    [
        ("aaab", ("aab",), "a", "aab"),  # a restart inside a partial match
        ("xabcabd", ("abcabd",), "x", "abcabd"),
        ("abcabcabd", ("abcabd",), "abc", "abcabd"),
        ("one END two", ("END two", "END"), "one ", "END"),  # complete first wins
        ("one END", ("D", "END"), "one ", "END"),  # complete together: the longer
        ("日本語です", ("語で",), "日本", "語で"),
    ],
)
def test_which_stop_string_ends_the_text(text: str, stops: tuple[str, ...], expected: str, stopped: str) -> None:
    pieces, detokenizer = stream(text, *stops)
    assert ("".join(pieces), detokenizer.stopped) == (expected, stopped)
