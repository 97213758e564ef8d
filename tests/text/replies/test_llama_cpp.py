"""Replies of llama.cpp's own tests of chats, read by what the chat template says, and at every cut.

350 of them are whole replies, counting a text for several templates once for each; 317 are written for one.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from helpers.real_checkpoints import llama_cpp_source
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.replies import Reply, ReplyFormat, ReplyPlan, fold
from rekindle.errors import InvalidRequest
from text.replies.llama_cpp_chats import LlamaCase, llama_cases

pytestmark = pytest.mark.slow
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MESSAGES = [{"role": "user", "content": "Hey there!"}]

AS_CONTENT = "llama.cpp is asked there to leave the reasoning in the content, which is no option here"
PROMPT = "llama.cpp repeats the prompt's own words, `Here are my reasoning steps:`, as the model's reasoning"
TWICE = "the model repeats the tag that its prompt has opened; llama.cpp shows the second one as reasoning"
# By template, the replies that are read in another way, and who is right.
DIFFERENCES: dict[str, dict[str, int]] = {
    "Qwen3.5-4B.jinja": {AS_CONTENT: 1, TWICE: 1},
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja": {AS_CONTENT: 1},
    "mistralai-Ministral-3-14B-Reasoning-2512.jinja": {AS_CONTENT: 1},
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja": {AS_CONTENT: 1},
    "Cohere2MoE.jinja": {AS_CONTENT: 1},
    "google-gemma-4-31B-it.jinja": {AS_CONTENT: 1},
    "inclusionai-ling-3.0-flash.jinja": {AS_CONTENT: 1},
    "openai-gpt-oss-120b.jinja": {AS_CONTENT: 1},
    "Apriel-1.6-15b-Thinker-fixed.jinja": {PROMPT: 2},
}


class Source:
    """The cases with their templates."""

    def __init__(self) -> None:
        folder = llama_cpp_source()
        self.cases = list(llama_cases(folder))
        self._templates = folder / "models" / "templates"

    @functools.cache  # noqa: B019 (one for the module)
    def template(self, name: str) -> ChatTemplate:
        return ChatTemplate((self._templates / name).read_text(), SPECIAL)

    def read(self, case: LlamaCase, pieces: Sequence[str], *, calls_in_pieces: bool = False) -> Reply:
        template, tools = self.template(case.template), case.tools
        options = {"enable_thinking": case.settings.get("enable_thinking", True)}
        try:
            prompt = template.render(MESSAGES, tools=tools or None, **options)
        except InvalidRequest:  # it renders nothing without tools, or wants variables of its own
            prompt = ""
        format = ReplyFormat.of_template(template.code(tools=bool(tools)))
        scanner = ReplyPlan(format, tuple(tools), pieces=calls_in_pieces).scanner(prompt, b"", 0)
        return fold([*(event for piece in pieces for event in scanner.feed(piece)), *scanner.finish()])


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


def said(reply: Reply) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    calls = [(call.name, dict(call.arguments)) for call in reply.tool_calls]
    return reply.content.strip(), reply.reasoning.strip(), calls


def meant(case: LlamaCase) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    calls = [(name, json.loads(arguments or "{}")) for name, arguments, _ in case.calls]
    return case.content.strip(), case.reasoning.strip(), calls


def test_whole_replies_agree(source: Source) -> None:
    whole = [case for case in source.cases if case.is_whole]
    assert len(whole) == 350 and sum(not case.looped for case in whole) == 317
    different = Counter(case.template for case in whole if said(source.read(case, [case.text])) != meant(case))
    assert different == {name: sum(reasons.values()) for name, reasons in DIFFERENCES.items()}


def cuts(text: str) -> Iterator[list[str]]:
    yield list(text)
    for at in range(0, len(text), 1 if len(text) < 200 else 5):
        yield [text[:at], text[at:]]


def test_every_reply_is_the_same_at_every_cut(source: Source) -> None:
    for case in source.cases:
        expected = said(source.read(case, [case.text]))
        for pieces in cuts(case.text):
            for calls_in_pieces in (False, True):
                assert said(source.read(case, pieces, calls_in_pieces=calls_in_pieces)) == expected, (case, pieces)


def test_ids_that_a_template_repeats_are_the_model_s(source: Source) -> None:
    for case in source.cases:
        if case.is_whole and "Kimi-K2" in case.template:
            ids = [call.id for call in source.read(case, [case.text]).tool_calls]
            assert ids == [id for _, _, id in case.calls], case.text
