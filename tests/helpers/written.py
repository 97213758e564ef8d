"""A checkpoint that writes given texts: it opens as any other does, with any chat template, and is exact.

It is a GPT-2 with the identity as embeddings and zeros as attention: the token after a position is the one in the
table of positions, whatever the prompt is. A chat with tools is played through once to know where each reply begins.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from helpers import checkpoints
from helpers.sessions import byte_tokenizer
from rekindle._src.calls.chat_prompt import chat_prompt
from rekindle._src.calls.tool_functions import tools_of
from rekindle._src.capabilities.replies.request import ChatReply
from rekindle._src.core.reply import Reply, fold
from rekindle._src.text.backends import WholeTokenizer
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.replies.history import WrittenReplies
from rekindle._src.text.tokenizer import Tokenizer

VOCAB, POSITIONS = 384, 2048  # one shape, so that all of them share their programs
SURE = 4.0  # times the identity: no other token is drawn at any temperature in use
BOS, END = "<s>", "</s>"


class Turn(NamedTuple):
    """One reply of a chat: its prompt, and its parts."""

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    reply: Reply


@dataclasses.dataclass
class Writer:
    """The texts that a checkpoint writes, by position."""

    template: str
    special: Sequence[str] = ()  # texts that are single, special tokens
    end: str = END  # the token that ends a reply
    table: dict[int, int] = dataclasses.field(default_factory=dict)
    written: WrittenReplies = dataclasses.field(default_factory=WrittenReplies)

    def __post_init__(self) -> None:
        backend = WholeTokenizer(byte_tokenizer().definition())
        texts = dict.fromkeys(text for text in (BOS, self.end, *self.special) if text != END)
        backend.add([tokenizers.AddedToken(text, special=True) for text in texts])
        self.tokenizer = Tokenizer(backend, special=self._special(), eos_ids=())
        assert self.tokenizer.vocab_size <= VOCAB
        self.chat = ChatTemplate(self.template, self._special())

    def _special(self) -> dict[str, str]:
        return {"bos_token": BOS, "eos_token": self.end}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def say(self, prompt_length: int, text: str) -> None:
        """Write `text` and the end of a reply after a prompt of that many tokens."""
        for place, token in enumerate([*self.encode(text), self.tokenizer.eos_ids[0]], prompt_length - 1):
            known = self.table.setdefault(place, token)
            assert known == token, f"two replies write at position {place}: lengthen the text before the second one"

    def turn(self, messages: Sequence[Mapping[str, Any]], text: str, **options: Any) -> Turn:
        """Write a reply to these messages."""
        prompt = chat_prompt(self.chat, messages, **options)
        assert prompt.render is not None
        rendered = prompt.render()
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        ids = self.written.restored(np.asarray(self.encode(rendered), np.int32), self.tokenizer.eos_ids, decode)
        self.say(len(ids), text)
        chat = prompt.extensions.get(ChatReply)
        if chat is None:
            return Turn(rendered, ids.tolist(), self.encode(text), text, Reply(text))
        scanner = chat.plan.scanner(rendered, ids.tobytes(), 0)
        reply = fold([*scanner.feed(text), *scanner.finish()])
        self.written.add(ids, self.encode(text), reply, chat.plan, decode)
        return Turn(rendered, ids.tolist(), self.encode(text), text, reply)

    def play(
        self, question: str, replies: Iterable[str], functions: Sequence[Callable[..., Any]], **options: Any
    ) -> list[Turn]:
        """Write all replies of a chat whose tools are run; the last one calls none."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        run = {function.__name__: function for function in functions}
        turns = []
        for text in replies:
            turns.append(turn := self.turn(messages, text, tools=tools_of(functions), **options))
            message: dict[str, Any] = {"role": "assistant", "content": turn.reply.content}
            if turn.reply.reasoning:
                message["reasoning_content"] = turn.reply.reasoning
            if turn.reply.tool_calls:
                message["tool_calls"] = [call.message() for call in turn.reply.tool_calls]
            messages.append(message)
            messages += [call.answer(run[call.name](**call.arguments)) for call in turn.reply.tool_calls]
        return turns

    def save(self, folder: Path) -> Path:
        """Write the checkpoint."""
        raw = {
            "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": VOCAB, "n_layer": 1, "n_head": VOCAB // 64,
            "n_inner": 64, "n_positions": POSITIONS, "eos_token_id": self.tokenizer.eos_ids[0],
        }  # fmt: skip
        state = {name: np.zeros_like(value) for name, value in checkpoints.tensors(raw).items()}
        state["transformer.wte.weight"] = np.eye(VOCAB, dtype=np.float32)
        state["transformer.ln_f.weight"] += SURE
        for name in ("ln_1", "ln_2"):
            state[f"transformer.h.0.{name}.weight"] += 1
        table = state["transformer.wpe.weight"]
        table[:, self.tokenizer.eos_ids[0]] = VOCAB
        for place, token in self.table.items():
            table[place] = VOCAB * np.eye(VOCAB, dtype=np.float32)[token]
        checkpoints.write(folder, raw, state)
        (folder / "tokenizer.json").write_bytes(self.tokenizer.definition())
        settings = {**self._special(), "chat_template": self.template, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder
