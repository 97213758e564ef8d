"""The index of a request's text proposes what a search through all of it would find."""

from __future__ import annotations

import itertools
import operator
import random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from rekindle._src.drafts.lookup import PromptLookup
from rekindle._src.drafts.repeats import SIZE, RepeatChances


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def searched(tokens: list[int]) -> int | None:
    """Where what followed the latest earlier occurrence of the last tokens begins."""
    last = tokens[-SIZE:]
    places = range(len(tokens) - SIZE - 1, -1, -1)
    return next((at + SIZE for at in places if len(last) == SIZE and tokens[at : at + SIZE] == last), None)


def lookup_of(tokens: list[int]) -> PromptLookup:
    return PromptLookup(RepeatChances(), array(tokens))


def proposed(lookup: PromptLookup, skip: int, most: int) -> list[int] | None:
    proposal = lookup.propose(skip, most)
    return None if proposal is None else list(proposal.tokens)


@given(
    prompt=st.lists(st.integers(0, 2) | st.integers(200_000, 200_002), min_size=1, max_size=40),
    output=st.lists(st.integers(0, 2), max_size=20),
    skip=st.integers(0, 3),
)
def test_it_finds_what_a_search_finds(prompt: list[int], output: list[int], skip: int) -> None:
    lookup, tokens, source = lookup_of(prompt), [*prompt], searched(prompt)
    for token in output:
        lookup.push(token)
        follows = source is not None and tokens[source] == token
        tokens.append(token)
        source = source + 1 if source is not None and follows else searched(tokens)
    if source is None:
        assert proposed(lookup, skip, 6) is None
    else:
        followed = tokens[source:]
        endless = followed * (12 // len(followed) + 1)
        assert proposed(lookup, skip, 6) == endless[skip : skip + 6]


def test_text_that_repeats_itself_is_taken_to_go_on() -> None:
    assert proposed(lookup_of([9, 1, 2, 3, 1, 2, 3, 1, 2]), 0, 7) == [3, 1, 2, 3, 1, 2, 3]


def test_pictures_are_neither_looked_up_nor_proposed() -> None:
    """All pictures have the same tokens, which stand as -1 here."""
    assert proposed(lookup_of([1, 2, 3, -1, -1, -1, -1, 9, 7, 1, 2, 3]), 0, 5) is None
    assert proposed(lookup_of([1, 2, 3, 4, 5, -1, -1, -1, -1, 9, 1, 2, 3]), 0, 5) == [4, 5]
    assert proposed(lookup_of([-1, -1, -1, -1]), 0, 5) is None
    lookup = lookup_of([-1, -1, 5, 6, 8, 8, 8, -1, -1])
    for token in (5, 6):
        lookup.push(token)
        assert proposed(lookup, 0, 5) is None, "what came after one picture does not come after another"
    lookup.push(8)
    lookup.push(8)
    assert proposed(lookup, 0, 1) == [8], "as after 6 8 8 of the text alone"


def test_a_place_that_was_right_is_kept_though_its_tokens_came_again() -> None:
    lookup = lookup_of([1, 2, 3, 4, 5, 6, 9, 4, 5, 6, 8, 1, 2, 3])
    for token in (4, 5, 6):
        lookup.push(token)
    assert proposed(lookup, 0, 1) == [9], "not the 8 that followed last time"
    lookup.push(8)
    assert proposed(lookup, 0, 3) == [1, 2, 3]
    lookup.push(7)
    assert proposed(lookup, 0, 3) is None


def expected(lookup: PromptLookup) -> float:
    """How many of 7 drafts are likely to be accepted."""
    proposal = lookup.propose(0, 7)
    assert proposal is not None
    return sum(itertools.accumulate(proposal.chances, operator.mul))


def test_more_drafts_are_expected_the_longer_the_text_repeats() -> None:
    lookup = lookup_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    each = [expected(lookup)]
    for token in (4, 5, 6):
        lookup.push(token)
        each.append(expected(lookup))
    assert 1.0 <= each[0] < each[1] < each[2] < each[3] < 7.0
    lookup.push(9)
    assert lookup.length == -1, "3 4 5 6 9 is new"


def test_a_request_whose_repetitions_end_has_lower_chances_than_others() -> None:
    chances = RepeatChances()
    torn = PromptLookup(chances, array([1, 2, 3, 4] * 5))
    for index in range(8):
        for token in (1, 2, 3, 100 + index):
            torn.push(token)
    other = PromptLookup(chances, array([1, 2, 3, 4] * 5))
    for token in (1, 2, 3):
        torn.push(token)
    for token in (9, 1, 2, 3):
        other.push(token)
    assert torn.length == other.length == 0
    assert expected(torn) < 0.7 * expected(other)


def test_chances_are_the_shares_that_went_on() -> None:
    """Of 400 repetitions, each goes on with a probability that depends on its length alone."""
    chances, rng = RepeatChances(), random.Random(5)
    truth = [0.2, 0.6, 0.9, 0.95]
    for _ in range(400):
        length = 0
        while length < 20 and rng.random() < truth[min(length, 3)]:
            length += 1
        chances.learn(0, length, 0.0)
    chances.learn(0, 0, 0.0)
    assert np.abs(np.array(chances.of(0, 0.0, 3)) - truth[:3]).max() < 0.12
