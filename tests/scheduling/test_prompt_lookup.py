"""The index of a request's text proposes what a search through all of it would find."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from rekindle._src.scheduling.followers import SIZE, PromptLookup


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def searched(tokens: list[int]) -> int | None:
    """Where what followed the latest earlier occurrence of the last tokens begins."""
    last = tokens[-SIZE:]
    places = range(len(tokens) - SIZE - 1, -1, -1)
    return next((at + SIZE for at in places if len(last) == SIZE and tokens[at : at + SIZE] == last), None)


@given(
    prompt=st.lists(st.integers(0, 2) | st.integers(200_000, 200_002), min_size=1, max_size=40),
    output=st.lists(st.integers(0, 2), max_size=20),
    skip=st.integers(0, 3),
)
def test_it_finds_what_a_search_finds(prompt: list[int], output: list[int], skip: int) -> None:
    lookup, tokens, source = PromptLookup(array(prompt)), [*prompt], searched(prompt)
    for token in output:
        lookup.push(token)
        follows = source is not None and tokens[source] == token
        tokens.append(token)
        source = source + 1 if source is not None and follows else searched(tokens)
    assert lookup.ready() == (source is not None)
    if source is not None:
        followed = tokens[source:]
        endless = followed * (12 // len(followed) + 1)
        assert lookup.propose(skip, 6).tolist() == endless[skip : skip + 6]


def test_text_that_repeats_itself_is_taken_to_go_on() -> None:
    lookup = PromptLookup(array([9, 1, 2, 3, 1, 2, 3, 1, 2]))
    assert lookup.propose(0, 7).tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_a_place_that_was_right_is_kept_though_its_tokens_came_again() -> None:
    lookup = PromptLookup(array([1, 2, 3, 4, 5, 6, 9, 4, 5, 6, 8, 1, 2, 3]))
    for token in (4, 5, 6):
        lookup.push(token)
    assert lookup.propose(0, 1).tolist() == [9], "not the 8 that followed last time"
    lookup.push(8)
    assert lookup.propose(0, 3).tolist() == [1, 2, 3]
    lookup.push(7)
    assert not lookup.ready()


def test_more_drafts_are_expected_the_longer_the_text_repeats() -> None:
    lookup = PromptLookup(array([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]))
    expected = [lookup.expected()]
    for token in (4, 5, 6, 9):
        lookup.push(token)
        expected.append(lookup.expected())
    assert expected == [1.0, 1.5, 2.0, 2.5, 1.0]


def test_it_waits_longer_and_longer_while_it_is_wrong() -> None:
    lookup = PromptLookup(array([1] * 6))
    waited = []
    for _ in range(8):
        lookup.learn(2, 0)
        waited.append(0)
        while not lookup.ready():
            lookup.push(1)
            waited[-1] += 1
    assert waited == [2, 4, 8, 16, 32, 64, 64, 64]
    lookup.learn(4, 1)
    assert lookup.ready()
    assert (lookup.drafted, lookup.accepted) == (20, 1)
