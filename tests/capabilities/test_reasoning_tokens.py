"""The tokens of a completion that were written inside its reasoning, however they came and whatever spells them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers.sessions import byte_tokenizer
from rekindle import tiny
from rekindle._src.capabilities.replies.request import ReplyOutput
from rekindle._src.core.records import FinishReason
from rekindle._src.dispatch.capability import SequenceEnd
from rekindle._src.text.detokenizer import Detokenizer
from rekindle._src.text.replies import ReplyFormat, ReplyPlan
from rekindle._src.text.replies.response_template import ResponseTemplate
from rekindle._src.text.tokenizer import Tokenizer
from text.replies.test_response_template import TEMPLATES

THINKS = ReplyFormat.of_family("hermes")
HARMONY = ReplyFormat.of_family("harmony")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(tiny.folder())


def count(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    size: int = 1,
    format: ReplyFormat = THINKS,
    prompt: str = "<think>",
    stop: Sequence[str] = (),
) -> int:
    """The tokens of reasoning of a reply that comes in pieces of so many tokens."""
    plan = ReplyPlan(format)
    detokenizer = Detokenizer(tokenizer, stop, visible=plan.visible)
    output = ReplyOutput(plan.scanner(prompt, b"", 0), plan.visible, lambda reply, ids: None)
    texts = []
    for at in range(0, len(token_ids), size):
        texts.append(detokenizer.push(token_ids[at : at + size]).text)
        output.delta(texts[-1], at, at + size, None)
    texts.append(detokenizer.flush())
    output.delta(texts[-1], len(token_ids), len(token_ids), FinishReason.LENGTH)
    end = SequenceEnd(FinishReason.LENGTH, "".join(texts), list(token_ids), detokenizer.ends)
    number = output.completion(end)["reasoning_tokens"]
    assert isinstance(number, int)
    return number


def spelled(tokenizer: Tokenizer, *texts: str) -> list[int]:
    """The tokens of these texts, each encoded alone."""
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_tokens_are_those_that_came(tokenizer: Tokenizer, size: int) -> None:
    """They were those of the text encoded anew: a model may spell a word in another way than its tokenizer."""
    letters = spelled(tokenizer, *"thinking about it")
    word = spelled(tokenizer, "thinking about it")
    assert len(word) < len(letters)
    closing, answer = spelled(tokenizer, "</think>"), spelled(tokenizer, "So: yes.")
    for tokens in (letters, word):
        assert count(tokenizer, [*tokens, *closing, *answer], size=size) == len(tokens)
        assert count(tokenizer, tokens, size=size) == len(tokens), "it was cut"
        opening = spelled(tokenizer, "<think>")
        whole = [*opening, *tokens, *closing, *answer]
        assert count(tokenizer, whole, size=size, prompt="") == len(tokens)
        assert count(tokenizer, whole, size=size, stop=["So"], prompt="") == len(tokens)
    assert count(tokenizer, [*closing, *answer], size=size) == 0
    assert count(tokenizer, [*spelled(tokenizer, "\n\n"), *closing, *answer], size=size) == 0, "it is empty"
    assert count(tokenizer, answer, size=size, prompt="") == 0


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_tokens_within_a_character_count(size: int) -> None:
    tokenizer = byte_tokenizer()
    closing = spelled(tokenizer, "</think>")
    for text in ("…", "a…", "…a", "é…é"):
        tokens = spelled(tokenizer, text)
        assert len(tokens) == len(text.encode())
        assert count(tokenizer, [*tokens, *closing, *spelled(tokenizer, "ok")], size=size) == len(tokens), text
        cut = tokens[:-1]
        assert count(tokenizer, [*cut, *closing], size=size) == len(cut), "its last character is incomplete"
        assert count(tokenizer, cut, size=size) == len(cut)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_several_messages_of_reasoning_count_together(tokenizer: Tokenizer, size: int) -> None:
    first, second, answer = (spelled(tokenizer, text) for text in ("One thing.", "And another.", "So: yes."))
    begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    final = spelled(tokenizer, end, "<|channel|>final<|message|>")
    text = [*spelled(tokenizer, begin), *first, *spelled(tokenizer, end, begin), *second, *final, *answer]
    count_of = len(first) + len(second)
    assert count(tokenizer, text, size=size, format=HARMONY, prompt="<|start|>assistant") == count_of
    opened = f"<|start|>assistant{begin}Before"
    rest = [*first, *final, *answer]
    assert count(tokenizer, rest, size=size, format=HARMONY, prompt=opened) == len(first), "of the prompt's none"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_response_template_s_reasoning_counts(tokenizer: Tokenizer, size: int) -> None:
    format = ReplyFormat(template=ResponseTemplate.load(TEMPLATES["json"]))
    thoughts = spelled(tokenizer, "One", " thing.")
    text = [*thoughts, *spelled(tokenizer, "</think>", "So: yes.")]
    assert count(tokenizer, text, size=size, format=format, prompt="<|im_start|>assistant\n<think>") == len(thoughts)
