"""A list of completions: a list in every respect, and a table in a notebook."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator

import pytest

from helpers.sessions import opened
from rekindle import Session
from rekindle._src.calls.handle import Completions
from rekindle._src.core.records import TokenLogprobs
from rekindle._src.views import html

EVIL = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with opened() as made:
        yield made


def test_it_is_a_list(session: Session) -> None:
    many = session.generate_sync(["hello", "you"], max_tokens=5)
    assert isinstance(many, list)
    assert many == list(many)
    assert list(many) == many
    assert [*many, 3][:2] == many
    assert type(pickle.loads(pickle.dumps(many))) is list
    assert pickle.loads(pickle.dumps(many)) == many
    assert copy.copy(many) == many
    assert json.dumps(Completions([1, 2])) == "[1, 2]"
    assert repr(Completions([1, 2])) == "[1, 2]"


def test_it_shows_a_table(session: Session) -> None:
    many = session.generate_sync([EVIL, "you"], max_tokens=5)
    made = many._repr_html_()
    assert type(made) is str
    assert made.count("<tr>") == 3
    assert "2 completions · 10 tokens" in made
    assert "<script" not in made
    assert "&lt;script&gt;" in made
    assert "0 of 27" in made


def test_a_long_list_is_one_line_and_a_short_table(session: Session) -> None:
    many = session.generate_sync(["hello"] * 60, max_tokens=2)
    assert repr(many) == "<Completions: a list of 60 completions, 120 tokens>"
    made = many._repr_html_()
    assert made.count("<tr>") == 51
    assert "and 10 more" in made


def test_a_completion_with_a_whole_vocabulary_of_probabilities_shows_a_few(session: Session) -> None:
    done = session.generate_sync("hello", max_tokens=1)
    entry = TokenLogprobs(done.token_ids[0], -1.0, tuple(range(27)), tuple([-2.0] * 27))
    many = dataclasses.replace(done, logprobs=(entry,))._repr_html_()
    assert many.count("13.5%") == html.ALTERNATIVES < 27


def test_shades_are_explained_where_there_are_some(session: Session) -> None:
    shade, others = "the more orange, the less likely", "point at a token for others"
    for options, words in (
        ({}, ()),
        ({"logprobs": 0}, (shade,)),
        ({"prompt_logprobs": 0}, (shade,)),
        ({"logprobs": 2}, (shade, others)),
    ):
        made = session.generate_sync("hello", max_tokens=2, **options)._repr_html_()
        assert [word for word in (shade, others) if word in made] == [*words], options


def test_several_of_each_prompt_have_their_places(session: Session) -> None:
    many = session.generate_sync(["hello", "you"], max_tokens=3, n=2, temperature=1.0, seed=1)
    made = many._repr_html_()
    for place in ("0.0", "0.1", "1.0", "1.1"):
        assert f">{place}<" in made
    one = session.generate_sync("hello", max_tokens=3, n=2)
    assert isinstance(one, list)
    assert "2 completions" in one._repr_html_()


def test_an_empty_one(session: Session) -> None:
    assert "0 completions" in Completions([])._repr_html_()


def test_errors_in_place_of_completions_have_rows_at_their_places() -> None:
    html = Completions([ValueError("the first <one>"), ValueError("the second")])._repr_html_()
    assert "ValueError: the first &lt;one&gt;" in html and html.index("the first") < html.index("the second")


# The object of a structured completion, as version 0.1 pickled it.
FROM_0_1 = (
    b"\x80\x04\x95P\x00\x00\x00\x00\x00\x00\x00\x8c\x18rekindle._src.core.reply\x94\x8c\x05_made\x94\x93\x94\x8c\x08"
    b'{"a": 1}\x94h\x00\x8c\x06Parsed\x94\x93\x94}\x94\x8c\x01a\x94K\x01sN\x86\x94\x81\x94\x86\x94R\x94.'
)


def test_objects_that_an_earlier_version_pickled_are_read() -> None:
    parsing = pickle.loads(FROM_0_1)
    assert parsing.get() == ({"a": 1}, None)
    assert b"ParseResult" not in pickle.dumps(parsing), "a pickle names as few classes as it can"
    assert pickle.loads(pickle.dumps(parsing)).get() == parsing.get()
