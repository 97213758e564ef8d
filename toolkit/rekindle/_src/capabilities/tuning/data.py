"""The lines of a training: token ids of texts, chats, pairs and preferences, and the learned tokens of each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.contracts import ChatLike, TokenizerLike
from rekindle._src.core.records import IntArray
from rekindle.errors import InvalidRequest

MOST_ITEMS = 1 << 20
_NEXT = 'Pass texts, (prompt, completion) pairs or chats: [{"role": "user", "content": "…"}, …]'
_PREFERENCES = "Pass (prompt, chosen, rejected), or a dict with these names"
_PROMPTS = "Pass texts, or chats that end with the user's message"


class Line(NamedTuple):
    """One line of a training."""

    ids: IntArray
    learned: NDArray[np.bool_]

    @property
    def learned_count(self) -> int:
        """The number of learned tokens: the first one of a line has nothing before it."""
        return int(self.learned[1:].sum())


def digest_of(lines: Sequence[Line]) -> str:
    """Return a digest of lines."""
    digest = hashlib.blake2b(digest_size=16)
    for ids, learned in lines:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, np.int32).data)
        digest.update(np.packbits(learned).data)
    return digest.hexdigest()


class LineMaker:
    """Makes lines with a model's tokenizer and chat template."""

    def __init__(self, tokenizer: TokenizerLike, chat: ChatLike | None, vocab_size: int, longest: int) -> None:
        self._tokenizer, self._chat, self._vocab_size, self._longest = tokenizer, chat, vocab_size, longest

    def next_tokens(self, data: object) -> list[Line]:
        """Return the lines of texts, pairs and chats."""
        return [line for index, item in enumerate(_items(data)) for line in self._line(f"data[{index}]", item)]

    def preferences(self, data: object) -> list[Line]:
        """Return two lines for each item: the prompt with the chosen completion, and with the rejected one."""
        lines: list[Line] = []
        for index, item in enumerate(_items(data)):
            field = f"data[{index}]"
            match item:
                case {"prompt": prompt, "chosen": chosen, "rejected": rejected}:
                    pass
                case (prompt, chosen, rejected):
                    pass
                case _:
                    raise InvalidRequest(field, item, "has no prompt with two completions", _PREFERENCES)
            start = self._prompt(field, prompt)
            lines += [self._completed(field, start, completion) for completion in (chosen, rejected)]
        return lines

    def prompts(self, data: object) -> list[tuple[object, list[int]]]:
        """Return the prompts of completions that are drawn: texts, or chats as the template writes them."""
        prompts: list[tuple[object, list[int]]] = []
        for index, item in enumerate(_items(data)):
            prompt = item["prompt"] if isinstance(item, Mapping) and "prompt" in item else item
            field = f"data[{index}]"
            ids = self._prompt(field, prompt)
            if len(ids) >= self._longest:
                self._too_long(field, len(ids))
            prompts.append((prompt, ids))
        return prompts

    def _line(self, field: str, item: Any) -> list[Line]:
        match item:
            case str() if item:
                return [self._whole(field, self._encode(item))]
            case {"messages": messages}:
                return self._chat_lines(field, messages)
            case {"prompt": prompt, "completion": completion}:
                return [self._completed(field, self._prompt(field, prompt), completion)]
            case {"text": str() as text} if text:
                return [self._whole(field, self._encode(text))]
            case [Mapping(), *_]:
                return self._chat_lines(field, item)
            case [int(), *_]:
                ids = self._ids(field, item)
                return [self._checked(field, ids, [True] * len(ids))]
            case (prompt, completion):
                return [self._completed(field, self._prompt(field, prompt), completion)]
        raise InvalidRequest(field, item, "is not a text, a pair or a chat, or is empty", _NEXT)

    def _whole(self, field: str, ids: list[int]) -> Line:
        ids = self._ended(ids)
        return self._checked(field, ids, [True] * len(ids))

    def _completed(self, field: str, start: list[int], completion: object) -> Line:
        match completion:
            case str() as text if text:
                end = self._ended(self._encode(text, special=False))
            case [{"role": "assistant", "content": str() as text}] if text:
                end = self._ended(self._encode(text, special=False))
            case [int(), *_]:
                end = self._ids(field, completion)
            case _:
                raise InvalidRequest(field, completion, "is not a completion, or is empty", "Pass a text")
        return self._checked(field, [*start, *end], [False] * len(start) + [True] * len(end))

    def _checked(self, field: str, ids: Sequence[int], learned: Sequence[bool]) -> Line:
        if len(ids) > self._longest:
            self._too_long(field, len(ids))
        line = Line(np.asarray(ids, np.int32), np.asarray(learned, np.bool_))
        if not line.learned_count:
            raise InvalidRequest(field, f"{len(ids)} tokens", "has no token to learn", "Pass longer ones")
        return line

    def _too_long(self, field: str, count: int) -> None:
        fix = "Cut it in parts, or raise it, up to the positions that the model has"
        raise InvalidRequest(field, words.count(count, "token"), f"are over max_length={self._longest}", fix)

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        return [int(one) for one in self._tokenizer.encode(text, add_special_tokens=special)]

    def _ended(self, ids: list[int]) -> list[int]:
        """Add the token that ends a text, unless it is there."""
        ends = self._tokenizer.eos_ids
        return ids if not ends or (ids and ids[-1] in ends) else [*ids, next(iter(ends))]

    def _prompt(self, field: str, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and prompt:
            return self._encode(prompt)
        if isinstance(prompt, Sequence) and prompt and not isinstance(prompt[0], Mapping | str):
            return self._ids(field, prompt)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
            return self._encode(self._rendered(prompt, answer=True), special=False)
        raise InvalidRequest(field, prompt, "is not a prompt, or is empty", _PROMPTS)

    def _ids(self, field: str, ids: Sequence[Any]) -> list[int]:
        if len(ids) > self._longest:
            self._too_long(field, len(ids))
        for one in ids:
            if isinstance(one, bool) or not hasattr(one, "__index__") or not 0 <= one.__index__() < self._vocab_size:
                raise InvalidRequest(field, one, "is not a token id", f"Pass numbers below {self._vocab_size}")
        return [one.__index__() for one in ids]

    def _rendered(self, messages: Any, *, answer: bool) -> str:
        if self._chat is None:
            fix = "Pass (prompt, completion) pairs of texts"
            raise InvalidRequest("data", "chats", "can't be written: the model has no chat template", fix)
        return self._chat.prepare(messages, add_generation_prompt=answer)()

    def _chat_lines(self, field: str, messages: Any) -> list[Line]:
        """Return the line of a chat. Of a template that rewrites earlier messages, each answer has a line.

        An answer is the text that the template adds, with the assistant's message, to the prompt for it.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest(field, messages, "is not a chat", _NEXT)
        answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers:
            fix = 'Add the answer: {"role": "assistant", "content": "…"}'
            raise InvalidRequest(field, messages, "has no message of the assistant, and answers are learned", fix)
        spans: list[tuple[str, str]] = []  # the text before an answer, and with it
        for index in answers:
            before = self._rendered(messages[:index], answer=True) if index else ""
            after = self._rendered(messages[: index + 1], answer=False)
            if not after.startswith(before):
                fix = "Pass (prompt, completion) pairs of texts, such as session.render makes"
                raise InvalidRequest(
                    field, messages, "has an answer that the template doesn't write after its prompt", fix
                )
            spans.append((before, after))
        whole = spans[-1][1]
        if all(whole.startswith(after) for _, after in spans):
            return [self._spanned(field, spans)]
        return [self._spanned(field, [span]) for span in spans]

    def _spanned(self, field: str, spans: Sequence[tuple[str, str]]) -> Line:
        ids: list[int] = []
        learned: list[bool] = []
        at = 0
        for before, after in spans:
            answer = after[len(before) :].rstrip("\n")  # the line's end after the token that ends a turn is not said
            for text, mine in ((before[at:], False), (answer, True), (after[len(before) + len(answer) :], False)):
                added = self._encode(text, special=False) if text else []
                ids += added
                learned += [mine] * len(added)
            at = len(after)
        return self._checked(field, ids, learned)


def _items(data: object) -> Sequence[Any]:
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise InvalidRequest("data", data, "must be a list", "Pass a list of examples")
    items = list(islice(data, MOST_ITEMS + 1))
    if not items:
        raise InvalidRequest("data", items, "is empty", "Pass some tens of examples")
    if len(items) > MOST_ITEMS:
        problem = f"is over the {MOST_ITEMS:,} that are possible"
        raise InvalidRequest("data", f"{len(items):,} examples and more", problem, "Pass fewer")
    return items
