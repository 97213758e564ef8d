"""A text that repeats itself is noticed at its end, in linear time; a text that does not is left alone."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import Completion, FinishReason, Repetition, Sampling, Timings, Usage
from rekindle._src.core.repetition import LEAST_TIMES, LEAST_TOKENS, repetition


def completed(tokens: list[int]) -> Completion:
    usage, timings = Usage(1, 0, len(tokens)), Timings(0.0, 0.0, 0.0)
    return Completion("r", "", tuple(tokens), FinishReason.LENGTH, None, (1,), usage, timings, Sampling())


@pytest.mark.parametrize("length", [1, 2, 7, 20, 100, 256])
def test_a_block_at_the_end_is_found_with_its_number(length: int) -> None:
    chance = random.Random(length)
    before = [chance.randrange(1000, 2000) for _ in range(70)]
    block = [chance.randrange(1000) for _ in range(length - 1)] + [5000]
    times = max(LEAST_TIMES, -(-LEAST_TOKENS // length))
    found = repetition(before + block * times)
    assert found == Repetition(70, length, times)
    assert str(found).startswith("repeats itself: the same")
    assert repetition(before + block * times + block[: length // 2]) is not None, "cut in the middle of a block"
    assert repetition(before + block * (times - 1)) is None
    assert repetition(before + block * times + [1, 2, 3]) is None, "it went on"


def test_usual_texts_are_left_alone() -> None:
    assert repetition([]) is None and repetition([7] * (LEAST_TOKENS - 1)) is None
    assert repetition(list(range(3000))) is None
    chance = random.Random(1)
    assert repetition([chance.randrange(50) for _ in range(3000)]) is None


def test_a_completion_says_it_in_its_line_and_in_html() -> None:
    looping, plain = completed([1, *[2, 3, 4] * 40]), completed(list(range(100)))
    assert looping.repetition == Repetition(1, 3, 40) and plain.repetition is None
    said = "repeats itself: the same 3 tokens 40 times at the end"
    assert said in repr(looping) and said in looping._repr_html_()
    assert "repeats" not in repr(plain) + plain._repr_html_()


@given(st.lists(st.integers(0, 2), max_size=200))
def test_it_says_what_a_plain_search_says(tokens: list[int]) -> None:
    def plain() -> tuple[int, int] | None:
        best = None
        for size in range(LEAST_TOKENS, len(tokens) + 1):
            end = tokens[-size:]
            period = next(p for p in range(1, size + 1) if end[p:] == end[: size - p])
            if size >= LEAST_TIMES * period:
                best = period, size // period
        return best

    found = repetition(tokens)
    assert (None if found is None else (found.length, found.times)) == plain()


@pytest.mark.clock
@pytest.mark.parametrize("text", ["a" * 1024, "ab" * 512, "ab" * 511 + "aa", ("a" * 15 + "b") * 64])
def test_its_time_is_bounded_by_the_window(text: str) -> None:
    """What is worst for it takes no longer in a text a hundred times as long."""

    def seconds(tokens: list[int]) -> float:
        began = time.process_time()
        for _ in range(20):
            repetition(tokens)
        return time.process_time() - began

    tokens = [ord(letter) for letter in text]
    short = min(seconds(tokens) for _ in range(3))
    assert min(seconds(tokens * 100) for _ in range(3)) < 10 * short + 0.01
