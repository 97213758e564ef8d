"""The tokenizer loses nothing, keeps digits apart, and its files say what the model was trained with."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.tokenizer import Tokenizer as LoadedTokenizer
from rekindle.tiny import folder
from workshop.tiny import corpus
from workshop.tiny.corpus import HELD_OUT, chat, documents

SHIPPED = Tokenizer.from_file(str(folder() / "tokenizer.json"))


def test_training_is_deterministic() -> None:
    first, second = (corpus.train_tokenizer(400, sample=150).to_str() for _ in range(2))
    assert first == second


@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert SHIPPED.decode(SHIPPED.encode(text).ids, skip_special_tokens=False) == text


def test_documents_survive_and_are_short() -> None:
    found = list(islice(documents(HELD_OUT), 200))
    encoded = [SHIPPED.encode(text).ids for text in found]
    assert [SHIPPED.decode(ids, skip_special_tokens=False) for ids in encoded] == found
    assert sum(map(len, found)) / sum(map(len, encoded)) > 3.5


def test_digits_are_tokens_of_their_own() -> None:
    assert SHIPPED.encode("10 + 25").tokens[:2] == ["1", "0"]
    assert not [token for token in SHIPPED.get_vocab() if len(token) > 1 and any(map(str.isdigit, token))]


def test_special_tokens_come_first() -> None:
    assert [SHIPPED.token_to_id(token) for token in corpus.SPECIAL] == [0, 1, 2]
    assert SHIPPED.get_vocab_size() == 2048


def test_the_chat_template_writes_what_the_corpus_does() -> None:
    template = ChatTemplate.load(folder())
    assert template is not None
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "I am Ember."},
    ]
    whole = chat([("Hello", "Hi!"), ("Who are you?", "I am Ember.")], "Be kind.")
    assert template.render(messages, add_generation_prompt=False) == whole
    assert template.render(messages[:-1]) == whole[: whole.rindex("I am Ember.")]


def test_the_chat_template_refuses_tools() -> None:
    template = ChatTemplate.load(folder())
    assert template is not None
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    with pytest.raises(Exception, match="not trained to call tools"):
        template.render([{"role": "user", "content": "Hello"}], tools=[tool])


def test_the_loader_finds_end_and_special_tokens() -> None:
    loaded = LoadedTokenizer.load(folder())
    assert loaded.vocab_size == 2048
    assert set(loaded.eos_ids) == {0, 2}
    ids = loaded.encode("<|im_start|>user\nHello<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert loaded.decode(ids) == "user\nHello"
