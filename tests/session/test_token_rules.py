"""`allowed_token_ids` and `bad_words`: what may not come does not come, whatever else a request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rekindle
from helpers.guides import RuleGuide, allowed_in
from helpers.sessions import byte_tokenizer, eventually, opened, wait_until_idle
from rekindle import Sampling, Session
from rekindle._src.core.records import mask_words
from rekindle._src.structured.token_rules import RestrictedGuide, rules_of
from rekindle.errors import InvalidRequest, NoTokenLeft

pytestmark = pytest.mark.usefixtures("large_steps")
VOCAB = 257


@pytest.fixture
def session() -> Iterator[Session]:
    with opened() as made:
        yield made
        wait_until_idle(made)


def may_come(guide: Any) -> set[int]:
    mask = np.zeros(mask_words(VOCAB), np.int32)
    assert guide.fill(mask) == ""
    return allowed_in(mask) & set(range(VOCAB))


@given(st.lists(st.text("abc ", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=4), st.data())
def test_allowed_tokens_never_complete_a_forbidden_word(words: list[str], data: Any) -> None:
    rules = rules_of(Sampling(bad_words=words), byte_tokenizer(), VOCAB)
    assert rules is not None
    guide, text = RestrictedGuide(rules), ""
    for _ in range(12):
        allowed = may_come(guide)
        wrong = {letter for letter in "abc " if any((text + letter).endswith(word.strip()) for word in words)}
        assert {letter for letter in "abc " if ord(letter) not in allowed} == wrong
        if not set("abc ") - wrong:
            return
        letter = data.draw(st.sampled_from(sorted(set("abc ") - wrong)))
        copied = guide.copy()
        guide.consume(ord(letter))
        assert may_come(copied) == allowed, "a copy stays where it was"
        text += letter


class Spelling:
    """A tokenizer that spells a word in another way after a space."""

    has_text, encodes_apart = True, False
    bos_id: int | None = None
    vocab_size = VOCAB
    eos_ids = (256,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return {"word": [10, 11], " word": [12], "two words": [13, 14], " two words": [1, 13, 14]}[text]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return ""


def test_a_word_is_barred_in_its_spelling_behind_a_space_too() -> None:
    rules = rules_of(Sampling(bad_words=[" word", "two words"]), Spelling(), VOCAB)
    assert rules is not None
    assert rules.behind == (((10,), 11), ((13,), 14)) and 12 not in allowed_in(rules.always)


def test_over_another_guide_both_count() -> None:
    rules = rules_of(Sampling(allowed_token_ids=[97, 98, 99, 200]), byte_tokenizer(), VOCAB)
    assert rules is not None
    guide = RestrictedGuide(rules, RuleGuide(lambda position, last: (98, 99, 100) if position == 0 else (5,), 2))
    assert may_come(guide) == {98, 99}
    guide.consume(98)
    mask = np.zeros(mask_words(VOCAB), np.int32)
    assert guide.fill(mask) == "allowed_token_ids leave no token that the structure allows"
    assert not guide.ended and guide.consume(5).ended and guide.ended and guide.consumed == 2


def test_only_allowed_tokens_come(session: Session) -> None:
    several = session.generate_sync("hello", max_tokens=40, allowed_token_ids=[97, 98, 99], n=3, temperature=1, seed=1)
    assert all(len(done.text) == 40 and set(done.text) == set("abc") for done in several)
    done = session.generate_sync("hello", max_tokens=40, allowed_token_ids=[256])
    assert (done.text, done.finish_reason) == ("", "eos"), "an end token that is named may come"


def test_neighbours_are_free_and_words_do_not_come(session: Session) -> None:
    plain = session.generate_sync("hello", max_tokens=60)
    letters = {"max_tokens": 60, "allowed_token_ids": [97, 98, 99]}
    handles = [
        session.submit("hello", max_tokens=60),
        session.submit("hello", **letters),
        session.submit("hello", bad_words=["ab", "ccc"], **letters),
        session.submit("hello", bad_words="a", **letters),
    ]
    free, letters_alone, words, one = (handle.result_sync().text for handle in handles)
    assert free == plain.text
    assert "ab" in letters_alone and set(letters_alone) == set("abc")
    assert "ab" not in words and "ccc" not in words and set(words) == set("abc")
    assert set(one) == set("bc") and len(words) == len(one) == 60


def test_a_request_that_has_no_token_left_fails_alone(session: Session) -> None:
    other = session.submit("hello", max_tokens=30)
    with pytest.raises(NoTokenLeft, match="allowed_token_ids and bad_words leave no token"):
        session.generate_sync("hello", allowed_token_ids=[97], bad_words=["a"])
    assert len(other.result_sync().text) == 30
    eventually(lambda: session.stats().running == 0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"allowed_token_ids": [5, 999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": "abc"}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": [3]}, "bad_words"),
        ({"bad_words": "x" * 300}, "bad_words"),
        ({"bad_words": ["x"] * 2000}, "bad_words"),
    ],
)
def test_wrong_ones_are_named(session: Session, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        session.generate_sync("hello", **options)
    assert refused.value.field == field


@pytest.mark.thorough
def test_on_the_device_with_and_without_a_structure() -> None:
    pytest.importorskip("llguidance", reason="structured output is the extra `structured`")
    with rekindle.open_sync("tiny", max_model_len=128, max_requests=4, quiet=True) as session:
        plain = session.generate_sync("Once upon a time", max_tokens=12)
        words = [session.tokenizer.decode([token]).strip() for token in plain.token_ids[:4]]
        words = [word for word in words if word.isalpha() and len(word) > 2]
        assert words
        done = session.generate_sync("Once upon a time", max_tokens=12, bad_words=words)
        barred = {tuple(session.tokenizer.encode(" " + word, add_special_tokens=False)) for word in words}
        assert all((token,) not in barred for token in done.token_ids) and done.token_ids != plain.token_ids
        assert session.generate_sync("Once upon a time", max_tokens=12).token_ids == plain.token_ids
        assert session.generate_sync("Tom", choice=["yes", "no"], bad_words="yes").text == "no"
