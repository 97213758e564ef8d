"""Vocabularies and chat templates that llama.cpp's source has: each text's tokens, each template's prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.real_checkpoints import llama_cpp_source
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import RekindleError

pytestmark = pytest.mark.slow
VOCABULARIES = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt",
    "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call_0_ab",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}},
}
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([{"role": "user", "content": "Hello! How are you?"}], None),
    "a system message and two turns": (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Bye"},
        ],
        None,
    ),
    "tools": ([{"role": "user", "content": "Rome's weather?"}], [TOOL]),
    "a call and its result": (
        [
            {"role": "user", "content": "Rome's weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_0_ab", "name": "weather", "content": "Sun"},
        ],
        [TOOL],
    ),
}


@pytest.fixture(scope="module")
def models() -> Path:
    return llama_cpp_source() / "models"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_text_of_a_vocabulary_has_the_same_tokens(models: Path, name: str) -> None:
    path = models / f"ggml-vocab-{name}.gguf"
    texts = path.with_name(path.name + ".inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    outputs = [
        [int(token) for token in line.split()] for line in path.with_name(path.name + ".out").read_text().split("\n")
    ]
    tokenizer = Tokenizer.load(path)
    pairs = list(zip(texts, outputs, strict=False))  # the last line of either file may be empty
    assert len(pairs) >= 45, "the files have another format"
    for text, expected in pairs:
        assert [*tokenizer.encode(text, add_special_tokens=False)] == expected, repr(text)


def test_every_template_writes_what_transformers_writes(models: Path) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    templates = sorted((models / "templates").glob("*.jinja"))
    assert len(templates) >= 50, "the folder has other files"
    compared = 0
    for path in templates:
        text = path.read_text()
        template = ChatTemplate(text, SPECIAL, source=path.name)
        for name, (messages, tools) in CHATS.items():
            try:
                (theirs,), _ = utils.render_jinja_template(
                    [messages], tools=tools, chat_template=text, add_generation_prompt=True, **SPECIAL
                )
            except Exception as error:  # a template may refuse a chat, or read keys that this one lacks
                if "generator is not JSON serializable" in str(error):  # map() makes a list here, which tojson can write
                    template.render(messages, tools=tools)
                    continue
                with pytest.raises(RekindleError):
                    template.render(messages, tools=tools)
                continue
            ours = template.render(messages, tools=tools)
            assert ours == theirs, f"{path.name}, {name}"
            compared += 1
    assert compared >= 150, "most templates accept most of these chats"
