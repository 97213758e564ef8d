"""Earlier replies keep the tokens that their model wrote, so that the next turn's prompt finds every cached page."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from helpers.chatting import HERMES
from helpers.written import Turn, Writer
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.replies import ReplyFormat, ReplyPlan, history
from rekindle._src.text.replies.history import WrittenReplies

# Reasoning is kept for replies since the last question alone.
KEEPING = HERMES.replace("<think>' + m.reasoning_content + '</think>", "<think>\n' + m.reasoning_content + '\n</think>")
KEEPING = KEEPING.replace("{{- m.content or '' }}", "{{- m.content or '' }}", 1).replace(
    "{% endfor %}{% endfor %}", "{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
DROPPING = KEEPING.replace("m.reasoning_content is defined", "false")


def add(a: int, b: float) -> str:
    """Add two numbers."""
    return f"{a + b}"


def call(a: int, text: str = '{"a": %d, "b": 1.50}') -> str:
    return f'<tool_call>\n{{"name":"add","arguments":{text % a}}}\n</tool_call>'


def loop(template: str, *replies: str) -> list[Turn]:
    return Writer(template, special=["<tool_call>", "</tool_call>"]).play("Add them.", replies, [add])


def share(before: Turn, after: Turn, writer: Writer) -> float:
    """The share of a turn's tokens that the next one's prompt begins with."""
    said = [*before.prompt_ids, *writer.encode(before.text)]
    same = np.equal(said, after.prompt_ids[: len(said)])
    return 1.0 if same.all() else float(np.argmin(same)) / len(said)


@pytest.mark.parametrize("template", [KEEPING, DROPPING])
def test_every_page_of_the_turn_before_is_there(template: str) -> None:
    """Other whitespace, other JSON and several calls: all in the model's own spelling."""
    think = "<think>Two numbers.\n\n</think>\n" if template == KEEPING else ""
    replies = [think + call(1), f"{think}Again:\n\n\n{call(2)}{call(3)}", think + call(4, '{"b":1e0,"a":%d}'), "Done."]
    turns = loop(template, *replies)
    writer = Writer(template, special=["<tool_call>", "</tool_call>"])
    assert [len(turn.reply.tool_calls) for turn in turns] == [1, 2, 1, 0]
    assert [share(*pair, writer) for pair in itertools.pairwise(turns)] == [1.0, 1.0, 1.0]
    canonical = writer.encode(turns[-1].prompt)
    assert canonical != turns[-1].prompt_ids, "the template writes them in another way"


def test_what_a_template_leaves_out_stays_out() -> None:
    turns = loop(DROPPING, f"<think>Two.</think>{call(1)}", "Done.")
    writer = Writer(DROPPING, special=["<tool_call>", "</tool_call>"])
    assert turns[1].prompt_ids == writer.encode(turns[1].prompt) and "Two." not in turns[1].prompt


class Chat:
    """A template with the tokens of its prompts."""

    def __init__(self, *special: str) -> None:
        self.writer = Writer(KEEPING, special=[*special])
        self.plan = ReplyPlan(ReplyFormat.of_template(ChatTemplate(KEEPING).code()))
        self.replies = WrittenReplies()

    def ids(self, *said: str) -> Any:
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
        return np.asarray(self.writer.encode(self.writer.chat.render(messages)), np.int32)

    def decode(self, ids: Any) -> str:
        return self.writer.tokenizer.decode(ids, skip_special_tokens=False)

    def wrote(self, text: str, *said: str) -> None:
        reply = self.plan.format.parse(text)
        self.replies.add(self.ids(*said), self.writer.encode(text), reply, self.plan, self.decode)

    def restored(self, *said: str) -> str:
        return self.decode(self.replies.restored(self.ids(*said), self.writer.tokenizer.eos_ids, self.decode))


def test_no_caller_chooses_the_spelling_of_another_s_prompt() -> None:
    """Options can make a model write a text letter by letter. A stranger that guesses a chat must not change its
    tokens."""
    chat = Chat("Hello")
    own = list(chat.writer.encode("Hello there!"))
    odd = [token for letter in "Hello there!" for token in chat.writer.encode(letter)]
    assert len(odd) == len(own) + 4
    plan, ends = chat.plan, chat.writer.tokenizer.eos_ids
    reply = plan.format.parse("Hello there!")
    chat.replies.add(chat.ids("Hi"), odd, reply, plan, chat.decode, None, "stranger")
    prompt = chat.ids("Hi", "Hello there!", "Go on.")
    for salt, caller in ((None, "victim"), (None, ""), ("salt", "stranger")):
        assert np.array_equal(chat.replies.restored(prompt, ends, chat.decode, salt, caller), prompt)
    assert len(chat.replies.restored(prompt, ends, chat.decode, None, "stranger")) == len(prompt) + 4


def test_a_prompt_s_replies_are_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's loop waits for it: four replies of 15,000 tokens to one prompt kept every stream for half a
    second, as often as a client spelled them otherwise."""
    chat, text, read = Chat(), "a" * 1_000, 0
    for spaces in range(4):
        chat.wrote(text + " " * spaces, "Hi")
    prompt, ends = chat.ids("Hi", "\n" + text, "Go on."), chat.writer.tokenizer.eos_ids

    def decode(ids: Any) -> str:
        nonlocal read
        read += len(ids)
        return chat.decode(ids)

    monkeypatch.setattr(history, "MOST_COMPARED", 1_500)
    assert len(chat.replies.restored(prompt, ends, decode)) == len(prompt) + 2 and 1_000 <= read <= 1_500
    monkeypatch.setattr(history, "MOST_COMPARED", 900)
    assert len(chat.replies.restored(prompt, ends, decode)) == len(prompt) + 2, "it was compared before"
    again = chat.ids("Hi", "\n\n" + text, "Go on.")
    assert np.array_equal(chat.replies.restored(again, ends, decode), again), "none is read"
    monkeypatch.setattr(history, "MOST_COMPARED", 1_500)
    other, read = chat.ids("Hi", "b" + text, "Go on."), 0
    assert np.array_equal(chat.replies.restored(other, ends, decode), other) and 1_000 <= read <= 1_500


def test_an_edited_reply_is_the_caller_s() -> None:
    chat = Chat()
    chat.wrote("  Hello.\n", "Hi")
    assert "<|assistant|>  Hello.\n</s><|user|>More" in chat.restored("Hi", "Hello.", "More")
    assert chat.restored("Hi", "Hello!", "More") == chat.decode(chat.ids("Hi", "Hello!", "More"))
    assert chat.restored("Ho", "Hello.", "More") == chat.decode(chat.ids("Ho", "Hello.", "More")), "another prompt"
    assert chat.restored("Hi") == chat.decode(chat.ids("Hi"))


def test_several_replies_to_one_prompt() -> None:
    chat = Chat()
    for number in range(6):
        chat.wrote(f" {number}\n", "Hi")
    assert [f" {number}\n</s>" in chat.restored("Hi", f"{number}", "More") for number in range(6)] == [False] * 2 + [
        True
    ] * 4, "the latest four"
    chat.wrote("5", "Hi")
    assert "<|assistant|>5</s>" in chat.restored("Hi", "5", "More"), "the last one written"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_KEPT", 8)
    chat = Chat()
    for number in range(20):
        chat.wrote(f" {number} ", f"Hi {number}")
        chat.restored("Hi 3", "3", "More")  # which is used all the time
    assert len(chat.replies) == 8
    kept = [f" {number} </s>" in chat.restored(f"Hi {number}", f"{number}", "More") for number in range(20)]
    assert [number for number in range(20) if kept[number]] == [3, *range(13, 20)]
    monkeypatch.setattr(history, "MAX_TOKENS", 40)
    chat.wrote("x" * 30, "Long")
    assert len(chat.replies) <= 4
    monkeypatch.setattr(history, "MAX_TOKENS", 1_000)
    chat.wrote(" " + "y" * 30, "Longer")
    assert "<|assistant|> yy" in chat.restored("Longer", "y" * 30, "More")
    monkeypatch.setattr(history, "LONGEST", 20)
    chat.wrote(" " + "z" * 30, "Longer")
    assert "<|assistant|> zz" not in chat.restored("Longer", "z" * 30, "More")


def test_replies_of_another_salt_are_not_found() -> None:
    """The number of a prompt's tokens would tell that somebody else had the same chat."""
    chat = Chat()
    ends, decode = chat.writer.tokenizer.eos_ids, chat.decode
    text = "  Hello.\n"
    ids, more = chat.ids("Hi"), chat.ids("Hi", "Hello.", "More")
    reply = chat.plan.format.parse(text)
    chat.replies.add(ids, chat.writer.encode(text), reply, chat.plan, decode, "mine")

    def kept(salt: str | None) -> bool:
        return text in decode(chat.replies.restored(more, ends, decode, salt))

    assert [kept(salt) for salt in ("mine", "yours", "", None)] == [True, False, False, False]


def test_a_reply_that_is_compared_often_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat()
    chat.wrote("Hello. ", "Hi")
    chat.restored("Hi", "Hello.", "More")
    monkeypatch.setattr(ReplyPlan, "scanner", None)
    assert "Hello. </s>" in chat.restored("Hi", "Hello.", "Still more")


def test_reasoning_in_blocks_of_the_content() -> None:
    """Ministral's template takes reasoning from blocks alone."""
    template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for block in m['content'] %}"
        "{% if block['type'] == 'thinking' %}{{ '[THINK]' + block['thinking'] + '[/THINK]' }}"
        "{% else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %}{{ '|' }}{% endfor %}"
    )
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
    assert ChatTemplate(template).render(said) == "Hi|[THINK]Hm.[/THINK]Yes.|"
    blocks = {**said[1], "content": [{"type": "thinking", "thinking": "Own."}]}
    assert ChatTemplate(template).render([said[0], blocks]) == "Hi|[THINK]Own.[/THINK]|"
    plain = ChatTemplate("{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}")
    assert plain.render(said[1:]) == "Hm.Yes."
    assert json.dumps(said), "the messages are the caller's, unchanged"
