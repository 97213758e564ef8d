"""Streamed text equals the text of all ids, and stop strings end it at the right character."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.thorough import by_default
from helpers.vocabularies import KINDS, SENTENCES, of_kind
from rekindle._src.text import Detokenizer, Tokenizer
from rekindle.errors import InvalidRequest

TOKENIZERS = {kind: of_kind(kind) for kind in KINDS}
UNLIKE = ("byte-level", "metaspace", "word pieces")  # in how they join pieces


def groups(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    # Two ids beyond the vocabulary: models pad theirs, and a random one samples there.
    return st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40)


@pytest.mark.parametrize("skip", by_default([True, False]), ids=["skip special", "keep special"])
@pytest.mark.parametrize("kind", by_default(KINDS, lambda kind: kind in UNLIKE))
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_stream_equals_decoding_all_ids(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(any_ids(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    streamed = ""
    for group in groups(ids, data.draw(st.lists(st.integers(0, 60), max_size=6))):
        streamed += detokenizer.push(group).text
        assert tokenizer.decode(ids, skip_special_tokens=skip).startswith(streamed), "what was delivered is final"
    assert streamed + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.released == detokenizer.tokens == len(ids)


@pytest.mark.parametrize("text", SENTENCES)
@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_real_text_comes_back_and_leaves_early(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([i]).text for i in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    assert "\ufffd" not in "".join(pieces)
    if kind == "byte-level" and text.isascii():
        assert all(pieces), "an ASCII token's text leaves with the token"


def stopped_by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first end of a stop string wins; of those that end together, the longest."""
    ends = [(match.end(), -len(stop), stop) for stop in stops for match in re.finditer(f"(?={re.escape(stop)})", text)]
    ends = [(end + len(stop), size, stop) for end, size, stop in ends]
    if not ends:
        return text, None
    end, size, stop = min(ends)
    return text[: end + size], stop


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="ab c", max_size=30),
    stops=st.lists(st.text(alphabet="ab c", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_do_not_depend_on_how_tokens_arrive(text: str, stops: list[str], cuts: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    expected, stop = stopped_by_definition(text, stops)
    detokenizer = Detokenizer(tokenizer, stops)
    streamed = ""
    for group in groups(tokenizer.encode(text), cuts):
        streamed += detokenizer.push(group).text
        assert expected.startswith(streamed)
    streamed += detokenizer.flush()
    assert (streamed, detokenizer.stopped) == (expected, stop)
    assert detokenizer.released == detokenizer.tokens


def test_tokens_are_released_with_their_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer, ["END"])
    seen = []
    for token in tokenizer.encode("oENd😀x"):
        text, _ = detokenizer.push([token])
        seen.append((text, detokenizer.released))
    # E and N wait for d to decide; the two first parts of the emoji wait for its last byte.
    assert seen == [("o", 1), ("", 1), ("", 1), ("ENd", 4), ("", 4), ("😀", 6), ("x", 7)]


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer, ["b"])
    assert detokenizer.push(tokenizer.encode("aabcc")) == ("aa", "b")
    assert (detokenizer.tokens, detokenizer.released) == (3, 3)
    assert detokenizer.push(tokenizer.encode("more")) == ("", "b")
    assert detokenizer.flush() == ""


def test_the_stop_string_can_be_included() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer, ["STOP"], include_stop=True)
    assert detokenizer.push(tokenizer.encode("go STOP on")).text == "go STOP"


def test_stop_strings_wait_for_min_tokens() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("a.b.c")
    detokenizer = Detokenizer(tokenizer, ["."], min_tokens=2)
    assert detokenizer.push(ids) == ("a.b", ".")
    assert detokenizer.tokens == 4


def test_special_tokens_can_be_kept() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("a<|im_end|>b")
    assert Detokenizer(tokenizer).push(ids).text == "ab"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids).text == "a<|im_end|>b"


def test_without_tokenizer_tokens_pass_and_stop_strings_are_refused() -> None:
    silent = Tokenizer(None)
    detokenizer = Detokenizer(silent)
    assert detokenizer.push([1, 2, 3]) == ("", None)
    assert detokenizer.released == 3
    assert detokenizer.flush() == ""
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        Detokenizer(silent, ["x"])
