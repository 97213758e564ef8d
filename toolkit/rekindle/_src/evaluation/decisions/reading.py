"""Reads the probabilities of a question's options: from one position where they are tokens, else token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.core.records import Completion, IntArray
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.intake import check_characters, check_count
from rekindle._src.text.replies import ReplyFormat
from rekindle.errors import InvalidRequest

_TAIL = 64  # tokens at the end of a prompt among which a special one is looked for
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning off
LEAST = -745.0  # of a log-probability: below it, its exponential is 0


class OptionTokens(NamedTuple):
    """The tokens of a prompt, and the tokens of each option after it."""

    before: IntArray
    options: list[IntArray]


class OptionReader:
    """Makes prompts and their options' tokens for one call. Options' tokens are kept from row to row.

    `check` is called before each text is encoded, and raises an error if nobody waits for the tokens any longer.
    """

    def __init__(self, front: Front, check: Callable[[], object]) -> None:
        self._front, self._check = front, check
        self._kept: dict[tuple[tuple[int, ...], tuple[str, ...]], list[IntArray] | None] = {}
        self._special: dict[int, bool] = {}

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, bool]:
        """Return the text before an answer, and whether a chat template made it."""
        front = self._front
        if front.chat is None:
            return "\n\n".join(message["content"] for message in messages) + "\nAnswer:", False
        format, code = front.chat.reply_format(), front.chat.code()
        assert isinstance(format, ReplyFormat), "a chat template says so"
        off: dict[str, Any] = {name: False for name in _SWITCHES if code.reads(name)}
        text = front.chat.prepare(messages, **off)()
        if format.thoughts is not None and format.opens_reasoning(text):
            text = f"{text.rstrip()}\n{format.thoughts.closing}\n\n"
        return text + (format.lead if format.in_channels else ""), True

    def tokens(self, text: str, options: Sequence[str], *, is_chat: bool) -> OptionTokens:
        """Encode a prompt, and each option as the model would write it after this prompt."""
        check_characters(text, self._front)
        encode = self._encode
        before = np.asarray(encode(text, add_special_tokens=not is_chat), np.int32)
        check_count(len(before), self._front)
        texts = tuple(options) if is_chat else tuple(f" {option}" for option in options)
        tail = self._tail(before)
        if tail is not None:
            key = tuple(tail.tolist()), texts
            if key not in self._kept:
                self._kept[key] = self._after(tail, texts)
            kept = self._kept[key]
            if kept is not None:
                return OptionTokens(before, kept)
        return self._whole(text, before, texts, is_chat)

    def _encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        self._check()
        return self._front.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _tail(self, ids: IntArray) -> IntArray | None:
        """Return the tokens after the last special one, at which texts are cut; None if there is none near the end."""
        for place in range(len(ids) - 1, max(-1, len(ids) - 1 - _TAIL), -1):
            if self._is_special(int(ids[place])):
                return ids[place + 1 :]
        return None

    def _is_special(self, token: int) -> bool:
        if token not in self._special:
            decode = self._front.tokenizer.decode
            self._special[token] = bool(decode([token], False)) and not decode([token], True)
        return self._special[token]

    def _after(self, tail: IntArray, texts: tuple[str, ...]) -> list[IntArray] | None:
        """Return the tokens of options after a tail; None if they change it."""
        tokenizer = self._front.tokenizer
        text = tokenizer.decode(tail.tolist(), False) if len(tail) else ""
        found: list[IntArray] = []
        for option in texts:
            ids = np.asarray(self._encode(text + option, add_special_tokens=False), np.int32)
            if len(ids) <= len(tail) or not np.array_equal(ids[: len(tail)], tail):
                return None
            found.append(ids[len(tail) :])
        return found

    def _whole(self, text: str, before: IntArray, texts: tuple[str, ...], is_chat: bool) -> OptionTokens:
        """Encode each option together with the whole prompt. It may change the last tokens of the prompt."""
        ends: list[tuple[int, IntArray]] = []  # of each: how many tokens the prompt gives it, and the others
        for option in texts:
            ids = np.asarray(self._encode(text + option, add_special_tokens=not is_chat), np.int32)
            shared = min(len(before), len(ids))
            differs = np.flatnonzero(before[:shared] != ids[:shared])
            shared = min(int(differs[0]) if len(differs) else shared, len(ids) - 1)
            ends.append((shared, ids[shared:].copy()))  # the prompt once, not once for each option
        start = min(shared for shared, _ in ends)
        if start < 1:
            fix = "Pass a longer state"
            raise InvalidRequest("state", text, "has no token before the options", fix)
        return OptionTokens(before[:start], [np.concatenate([before[start:shared], ids]) for shared, ids in ends])


class OptionRead(NamedTuple):
    """One request of a question: the options that it reads."""

    tokens: IntArray  # of the request's prompt, which ends with the first of the options
    options: tuple[int, ...]  # the places of the options, all of one token, or one option of several


def first_reads(encoded: OptionTokens) -> list[OptionRead]:
    """Return the requests that a question begins with: one for all options of one token, one for each other.

    The first of them reports the 20 most likely tokens at its place, of which the others are probably some.
    """
    single = tuple(place for place, ids in enumerate(encoded.options) if len(ids) == 1)
    return ([_read(encoded, *single)] if single else []) + [
        _read(encoded, place) for place, ids in enumerate(encoded.options) if len(ids) > 1
    ]


def token_bytes(encoded: OptionTokens) -> int:
    """Return the bytes of a question's tokens and all its requests; each request repeats the prompt.

    There are as many as options at most: at first one for all of one token, and later one for each that it misses.
    """
    return encoded.before.nbytes * (1 + len(encoded.options)) + 2 * sum(ids.nbytes for ids in encoded.options)


def later_reads(encoded: OptionTokens, logprobs: Mapping[int, float]) -> list[OptionRead]:
    """Return the requests for the options that the first ones did not find."""
    return [_read(encoded, place) for place in range(len(encoded.options)) if place not in logprobs]


def _read(encoded: OptionTokens, *places: int) -> OptionRead:
    return OptionRead(np.concatenate([encoded.before, encoded.options[places[0]]]), places)


def found(encoded: OptionTokens, read: OptionRead, done: Completion) -> dict[int, float]:
    """Return the log-probabilities of the options that a request has read, by their places."""
    entries = done.prompt_logprobs or ()
    logprobs = {read.options[0]: math.fsum(entry.logprob for entry in entries)}
    if len(read.options) > 1:
        likely = dict(zip(entries[0].top_ids, entries[0].top_logprobs, strict=True))
        for place in read.options[1:]:
            token = int(encoded.options[place][0])
            if token in likely:
                logprobs[place] = likely[token]
    return logprobs


def exclusive(options: Sequence[IntArray], logprobs: Mapping[int, float]) -> list[float]:
    """Return the log-probability of each option: that the model writes it, and none of the others.

    Of an option that others begin with, such as "bug" beside "bug report", the probability of those is taken off.
    """
    taken = [0.0] * len(options)
    for place, shorter in enumerate(beginnings(options)):
        if shorter is not None:
            taken[shorter] += math.exp(logprobs[place])
    left = []
    for place, longer in enumerate(taken):
        rest = math.exp(logprobs[place]) - longer
        left.append(max(LEAST, logprobs[place] if not longer else math.log(rest) if rest > 0.0 else LEAST))
    return left


def beginnings(options: Sequence[IntArray]) -> list[int | None]:
    """Return for each option the place of the longest other one that it begins with, in a time that grows with their
    lengths.
    """
    texts = [np.asarray(ids, ">i4").tobytes() for ids in options]  # they sort as their tokens do
    found: list[int | None] = [None] * len(texts)
    open_: list[int] = []  # the next option may begin with these, of which each begins with the one before
    for place in sorted(range(len(texts)), key=texts.__getitem__):
        while open_ and not (len(texts[open_[-1]]) < len(texts[place]) and texts[place].startswith(texts[open_[-1]])):
            open_.pop()
        found[place] = open_[-1] if open_ else None
        open_.append(place)
    return found
