"""Budgets of reasoning, and grammars that begin with the answer: the guide's steps, token by token."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from helpers.chatting import with_special_tokens
from rekindle._src.core.records import mask_words
from rekindle._src.structured.reasoning import ReasoningGuide, ReasoningRules, TokenTexts
from rekindle._src.text.replies import ReplyFormat, ReplyPlan
from rekindle._src.text.tokenizer import Tokenizer

THINK = ReasoningRules("<think>", ("</think>",))
TOKENIZER = with_special_tokens("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")
PLAIN = with_special_tokens()
VOCAB = 320


class Writing:
    """Writes a text under a guide, as a model that would go on with `text`: forced tokens come first."""

    def __init__(self, rules: ReasoningRules, tokenizer: Tokenizer = TOKENIZER, inner: Any = None) -> None:
        self.tokenizer = tokenizer
        self.guide = ReasoningGuide(rules, TokenTexts(tokenizer), tokenizer.eos_ids, inner)
        self.tokens: list[int] = []

    def allowed(self) -> set[int]:
        mask = np.zeros(mask_words(VOCAB), np.int32)
        assert self.guide.fill(mask) == ""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
        return set(np.flatnonzero(bits).tolist())

    def take(self, token: int) -> None:
        assert token in self.allowed()
        report = self.guide.consume(token)
        assert not report.problem
        self.tokens.append(token)

    def write(self, text: str, *, knows: bool = False) -> str:
        """Write the text, with everything that has to come instead; one that `knows` it has these tokens itself."""
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            while len(allowed := self.allowed()) == 1 and not (knows and token in allowed):
                self.take(*allowed)
            self.take(token)
        while self.guide.ahead and len(self.allowed()) == 1:
            self.take(*self.allowed())
        return self.tokenizer.decode(self.tokens, skip_special_tokens=False)


def budget(tokens: int, **changes: Any) -> ReasoningRules:
    return dataclasses.replace(THINK, budget=tokens, **changes)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, PLAIN], ids=["one token", "seven tokens"])
def test_the_end_is_written_when_the_tokens_are_used_up(tokenizer: Tokenizer) -> None:
    assert Writing(budget(5, inside=True), tokenizer).write("abcdefgh") == "abcde</think>fgh"
    assert Writing(budget(5), tokenizer).write("<think>abcdefgh") == "<think>abcde</think>fgh"
    assert Writing(budget(0, inside=True), tokenizer).write("Yes.") == "</think>Yes."
    assert Writing(budget(0), tokenizer).write("<think>abc") == "<think></think>abc"
    assert Writing(budget(9, inside=True), tokenizer).write("abc</think>defghijklmnop") == "abc</think>defghijklmnop"
    assert Writing(budget(3, inside=True), tokenizer).write("abc</think>d", knows=True) == "abc</think>d", "its own end"
    assert Writing(budget(3), tokenizer).write("No tags at all.") == "No tags at all."
    said = Writing(budget(2, inside=True, message=" Enough.\n"), tokenizer).write("abcd")
    assert said == "ab Enough.\n</think>cd"


def test_tokens_of_the_prompt_count() -> None:
    assert Writing(budget(5, inside=True, used=3)).write("abcdef") == "ab</think>cdef"
    assert Writing(budget(5, inside=True, used=7)).write("abc") == "</think>abc"
    texts = TokenTexts(TOKENIZER)
    for prompt, used in (("x<think>\n", 0), ("x<think>\nabc", 3), ("<think>" + "y" * 99, 8), ("x<think>", 0)):
        assert budget(8, inside=True).after(TOKENIZER.encode(prompt), texts).used == used, prompt
    assert THINK.after(TOKENIZER.encode("<think>abc"), texts) is THINK


@pytest.mark.parametrize(("text", "count"), [("ab😀d", 3), ("aéb", 2), ("a€b", 2), ("a€b", 3)])
def test_a_forced_end_waits_for_whole_characters(text: str, count: int) -> None:
    said = Writing(budget(count, inside=True)).write(text)
    assert "\ufffd" not in said and said.replace("</think>", "") == text and said != text


def test_bytes_that_never_make_a_character_end_too() -> None:
    writing = Writing(budget(2, inside=True))
    for _ in range(20):
        writing.take(0xF0 if 0xF0 in writing.allowed() else next(iter(writing.allowed())))
        if len(writing.tokens) > 8:
            break
    assert writing.tokens[6] == TOKENIZER.encode("</think>")[0], "after four tokens at most"


def test_the_beginning_of_an_end_is_waited_for() -> None:
    assert Writing(budget(5, inside=True), PLAIN).write("abc</think>d", knows=True) == "abc</think>d"
    assert Writing(budget(5, inside=True), PLAIN).write("abc</tho>") == "abc</tho</think>>"
    said = Writing(budget(1, inside=True), PLAIN).write("<" * 40)
    assert said == "<" * 9 + "</think>" + "<" * 31, "not for ever"


def test_a_new_start_tag_counts_anew() -> None:
    """Where the family reasons anywhere; elsewhere the tag is text of the answer, as the reader of replies has it."""
    again = Writing(budget(2, again=True)).write("<think>abc d<think>efg")
    assert again == "<think>ab</think>c d<think>ef</think>g"
    assert Writing(budget(2)).write("<think>abc d<think>efg") == "<think>ab</think>c d<think>efg"
    assert Writing(budget(2), PLAIN).write("Use <think>efgh") == "Use <think>efgh"
    assert Writing(budget(2), PLAIN).write("\n <think>efgh") == "\n <think>ef</think>gh"


def test_a_call_ends_counting() -> None:
    rules = budget(4, inside=True, closings=("</think>", "<tool_call>"))
    assert Writing(rules, PLAIN).write("ab<tool_call>{1234567}") == "ab<t</think>ool_call>{1234567}", (
        "it began too late"
    )
    rules = dataclasses.replace(rules, budget=20)
    assert Writing(rules, PLAIN).write("ab<tool_call>{1234567890123456}").endswith("<tool_call>{1234567890123456}")


def test_a_rejected_draft_leaves_nothing_behind() -> None:
    writing = Writing(budget(3, inside=True))
    writing.write("ab")
    ahead = writing.guide.copy()
    for token in TOKENIZER.encode("xy"):
        ahead.consume(token)
    assert ahead.ahead != () and writing.guide.ahead == ()
    assert writing.write("cdef") == "abc</think>def"
    assert ahead.consume(5).problem, "a draft in place of a forced token"


class Letters:
    """A guide for a text of three capital letters."""

    def __init__(self, count: int = 0) -> None:
        self.consumed, self.spent, self.ended, self._count = 0, 0.0, False, count

    def copy(self) -> Letters:
        clone = Letters(self._count)
        clone.consumed, clone.ended = self.consumed, self.ended
        return clone

    @property
    def ahead(self) -> tuple[int, ...]:
        return ()

    def fill(self, mask: Any) -> str:
        mask.fill(0)
        for letter in range(65, 91):
            mask[letter >> 5] |= 1 << (letter & 31)
        return ""

    def consume(self, token: int) -> Any:
        from rekindle._src.core.records import GuideReport

        self.consumed += 1
        self._count += 1
        self.ended = self._count == 3
        return GuideReport(ended=self.ended, problem="" if 65 <= token < 91 else "no capital")


CAPITALS = set(range(65, 91))
OPENS, CLOSES = TOKENIZER.encode("<think></think>")


def test_a_grammar_begins_with_the_answer() -> None:
    inside = Writing(dataclasses.replace(THINK, inside=True), inner=Letters())
    assert len(inside.allowed()) == VOCAB - 1 and TOKENIZER.eos_ids[0] not in inside.allowed(), "it may not end here"
    inside.write("what to say</think>")
    assert inside.allowed() == CAPITALS and inside.write("ABC").endswith("</think>ABC") and inside.guide.ended
    either = Writing(THINK, inner=Letters())
    assert either.allowed() == CAPITALS | {OPENS}
    at_once = either.guide.copy()
    at_once.consume(65)
    assert not at_once.ended and at_once.consumed == 1
    either.write("<think>hm</think>")
    assert either.allowed() == CAPITALS, "it has reasoned"
    never = Writing(dataclasses.replace(THINK, opens=False), inner=Letters())
    assert never.allowed() == CAPITALS


def test_a_grammar_begins_after_a_forced_end() -> None:
    writing = Writing(budget(3, inside=True), inner=Letters())
    writing.write("abc")
    assert writing.write("XYZ") == "abc</think>XYZ" and writing.guide.ended and writing.guide.consumed == 7


def test_an_opening_tag_of_several_tokens() -> None:
    rules = dataclasses.replace(THINK, opening="AB>", closings=("C>",))
    writing = Writing(rules, PLAIN, Letters())
    assert writing.write("AB>hm C>") == "AB>hm C>" and writing.allowed() == CAPITALS
    answer = Writing(rules, PLAIN, Letters())
    assert answer.write("ABZ") == "ABZ" and answer.guide.ended, "an answer that begins as the tag does"


def test_the_end_of_long_reasoning_is_looked_for_in_its_last_characters() -> None:
    """32,000 tokens of reasoning were searched as a whole for each of them, which took 3 s, with 64,000 15 s."""
    longest = 0

    class Text(str):
        def __radd__(self, other: str) -> Text:
            nonlocal longest
            longest = max(longest, len(other) + len(self))
            return Text(str(other) + str(self))

    class Words:
        def text_of(self, token: int) -> str:
            return Text(("word ", "</t", "hink>yes")[token])

        def tokens_of(self, text: str) -> tuple[int, ...]:
            return ()

    rules = dataclasses.replace(THINK, inside=True)
    texts: Any = Words()
    assert rules.answer_in([0] * 2_000 + [1, 0, 1, 2, 0], texts) == (2_004, "yes")
    assert 0 < longest < 20


def test_the_end_of_reasoning_and_the_answer_in_one_token() -> None:
    tokenizer = with_special_tokens("</think>X")
    writing = Writing(dataclasses.replace(THINK, inside=True), tokenizer, Letters())
    writing.write("hm</think>XYZ")
    assert writing.guide.ended
    rules = dataclasses.replace(THINK, inside=True)
    start, rest = rules.answer_in(writing.tokens, TokenTexts(tokenizer))
    assert (tokenizer.decode(writing.tokens[start:]), rest) == ("YZ", "X")


HARMONY = ReplyPlan(ReplyFormat.of_family("harmony"))


def test_harmony_has_several_messages_of_reasoning_and_an_answer_on_its_own_channel() -> None:
    prompt = "<|start|>assistant"
    rules = ReasoningRules.of(HARMONY, prompt, (4, ""))
    cut = Writing(rules, TOKENIZER, Letters())
    forced = "<|channel|>analysis<|message|>abcd<|end|><|start|>assistant<|channel|>final<|message|>"
    assert cut.write("<|channel|>analysis<|message|>abcd", knows=True) == forced, "no more analysis after its tokens"
    assert cut.write("XYZ") == forced + "XYZ" and cut.guide.ended
    writing = Writing(rules, TOKENIZER, Letters())
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant" * 2 + "<|channel|>final<|message|>XYZ"
    assert writing.write(text, knows=True) == text and writing.guide.ended
    start, rest = rules.answer_in(writing.tokens, TokenTexts(TOKENIZER))
    assert TOKENIZER.decode(writing.tokens[start:]) == "XYZ" and rest == ""
    free = Writing(rules).write("<|channel|>analysis<|message|>abcdef")
    assert free == "<|channel|>analysis<|message|>abcd<|end|>ef"


@pytest.mark.parametrize("family", ReplyFormat.names())
def test_every_family_s_rules(family: str) -> None:
    plan = ReplyPlan(ReplyFormat.of_family(family), ({"function": {"name": "f"}},))
    thoughts = plan.format.thoughts
    if thoughts is None:
        return
    header = plan.format.marks.header
    inside = ReasoningRules.of(plan, f"Hi{thoughts.opening}{header}\n", (3, ""))
    assert inside.inside and inside.closings[0] == thoughts.closing
    assert not ReasoningRules.of(plan, "Hi", (3, "")).inside
    assert ReasoningRules.read(json.loads(json.dumps(inside.values()))) == inside
    said = Writing(inside, PLAIN).write("abcde")
    assert said == f"abc{thoughts.closing}de"


def test_rules_from_elsewhere_are_checked() -> None:
    for values in ([], ["a"], ["a", []], ["a", ["b"], False, True, False, -1], ["a", [3]], [*THINK.values(), 1]):
        with pytest.raises((TypeError, ValueError)):
            ReasoningRules.read(values)
