"""Chats that outgrow the context, as a capability of requests: their prompts are made again without the oldest turns.

Prompts are measured as they run, rendered by the chat template and encoded with their pictures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Protocol

import anyio
import anyio.to_thread

from rekindle._src.capabilities.overflow.turns import (
    ChatCuts,
    Messages,
    cuts_of,
    leaving,
    missing,
    search,
    size_of,
    turns_of,
    without_turns,
)
from rekindle._src.core.drawable import Record
from rekindle._src.core.extension import Extension, Extensions
from rekindle._src.core.left_out import LeftOut
from rekindle._src.core.records import Request
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Fields, Part, PromptFit, ReadPrompt, SequenceEnd
from rekindle.errors import InvalidRequest, PromptTooLong

SAMPLE = 4_096  # characters at a chat's beginning that tell how many of them a token has
MOST_FUNCTIONS = 8  # that run at once; others wait
_SHARE_OF_ANSWER = 4  # at most a fourth of the context is kept free for an answer

Overflow = str | Callable[["OverfullChat"], Sequence[Mapping[str, Any]]]  # "drop", "refuse", or a function


class ChatSource(Protocol):
    """A prompt of a chat: what renders it, and what its capabilities know of it."""

    @property
    def render(self) -> Callable[[], str] | None: ...
    @property
    def extensions(self) -> Extensions: ...


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class OverfullChat(Record):
    """A chat that has no room in the context, as a function for `overflow` gets it."""

    messages: tuple[Mapping[str, Any], ...]  # all of them
    turns: tuple[range, ...]  # places of the messages of each turn, the oldest first
    room: int  # tokens that the prompt may have

    def without(self, turns: int) -> list[Mapping[str, Any]]:
        """Return the messages without so many of the oldest turns; system messages and pinned turns stay."""
        return without_turns(self.messages, turns)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OverflowRule(Extension):
    """Of a submission: how its prompt is made again from fewer messages."""

    overflow: Overflow
    messages: Messages
    prompt: Callable[[Messages], ChatSource]
    extra: int  # about how many characters the prompt has besides messages


def check_overflow(overflow: object) -> None:
    """Raise `InvalidRequest` for anything but "drop", "refuse" or a function."""
    if overflow not in ("drop", "refuse") and not callable(overflow):
        fix = 'Use "drop", "refuse", or a function that returns the messages of the prompt'
        raise InvalidRequest("overflow", overflow, "is not known", fix)


def rule_of(
    overflow: Overflow, messages: Messages, prompt: Callable[[Messages], ChatSource], extra: int
) -> OverflowRule | None:
    """Return the extension of a chat's submission; None if it has no other prompt."""
    if overflow == "refuse" or not isinstance(messages, list | tuple):
        return None
    if not all(isinstance(message, Mapping) for message in messages):
        return None  # the template refuses them
    return OverflowRule(overflow, messages, prompt, extra)


class OverflowIntake(Capability[None]):
    """A chat's prompt leaves out turns if it is too long."""

    def __init__(self) -> None:
        self._functions: anyio.CapacityLimiter | None = None  # made on the loop

    def fit(self, submission: Submission, front: Front) -> PromptFit | None:
        rule = submission.extensions.get(OverflowRule)
        if rule is None:
            return None
        if self._functions is None:  # of their own: they may wait for requests, which need threads of the others
            self._functions = anyio.CapacityLimiter(MOST_FUNCTIONS)
        return OverflowFit(submission, rule, front, self._functions)

    def waits(self, submission: Submission, front: Front) -> bool:
        rule = submission.extensions.get(OverflowRule)
        return rule is not None and callable(rule.overflow)

    def overtaken(self, submission: Submission, front: Front) -> bool:
        return self.waits(submission, front)  # a function may take long, and ask the session itself

    def part(self, request: Request, submission: Submission, front: Front) -> Part[None] | None:
        left_out = submission.extensions.get(LeftOut)
        return None if left_out is None else LeftOutPart(left_out)


class LeftOutPart(Part[None]):
    """The note on a completion that its prompt leaves out turns."""

    __slots__ = ("_left_out",)

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out

    def completion(self, end: SequenceEnd) -> Fields:
        return {"left_out": self._left_out}


class OverflowFit(PromptFit):
    """Looks for the longest prompt of a chat that leaves room for an answer."""

    def __init__(
        self, submission: Submission, rule: OverflowRule, front: Front, functions: anyio.CapacityLimiter
    ) -> None:
        super().__init__(submission)
        self._functions = functions
        self._rule, self._front, self._context = rule, front, front.config.max_model_len or 0
        answer = max(1, min(submission.sampling.max_tokens, self._context // _SHARE_OF_ANSWER))
        self._room = max(1, self._context - answer)  # tokens of the prompt
        self._cuts = ChatCuts((0,), 0)
        self._search: Generator[int, bool, int] | None = None
        self._place = 0  # in the cuts, of the prompt that is read now
        self._read: dict[int, ReadPrompt] = {}
        self._last = False  # no shorter prompt can follow the one that is read now

    async def next(self, read: ReadPrompt | PromptTooLong | None) -> ReadPrompt | Submission:
        if read is None:
            return await self._begin()
        if self._last:  # it may take the room of the answer; the scheduler refuses it if it has none at all
            return await super().next(read)
        fits = isinstance(read, ReadPrompt) and len(read.token_ids) <= self._room
        if isinstance(read, ReadPrompt) and fits:
            self._read[self._place] = read
        if callable(self._rule.overflow):
            return self._read[0] if fits else await self._called(self._rule.overflow)
        if self._search is None:
            return self._read[0] if fits else await self._measured()
        return await self._searched(fits)

    async def _begin(self) -> ReadPrompt | Submission:
        if callable(self._rule.overflow):
            return self._submission
        long = self._submission.long  # looking at as many values takes milliseconds
        size = await anyio.to_thread.run_sync(self._size) if long else self._size()
        # A chat with fewer characters than the room has tokens most often fits.
        return self._submission if size <= self._room else await self._measured()

    def _size(self) -> int:
        return self._rule.extra + sum(map(size_of, self._rule.messages))

    async def _measured(self) -> ReadPrompt | Submission:
        """Begin the search."""
        self._cuts = await anyio.to_thread.run_sync(self.measure)
        self._search = search(len(self._cuts.turns), self._cuts.guess)
        return await self._searched(None)

    def measure(self) -> ChatCuts:
        return cuts_of(self._rule.messages, self._room * self._characters_per_token(), self._rule.extra)

    def _characters_per_token(self) -> float:
        """Return how many characters a token has at the chat's beginning, which later turns do not change."""
        texts, most = list[str](), min(SAMPLE, self._context)
        for content in [message.get("content") for message in self._rule.messages]:
            if isinstance(content, str) and most > 0:
                texts.append(content[:most])
                most -= len(texts[-1])
        sample = "\n".join(texts)
        return max(1, len(sample)) / max(1, len(self._front.tokenizer.encode(sample, add_special_tokens=False)))

    async def _searched(self, fits: bool | None) -> ReadPrompt | Submission:
        """Go on with the search: the prompt that was read fits, or not; None at first."""
        assert self._search is not None, "it has begun"
        try:
            self._place = next(self._search) if fits is None else self._search.send(fits)
        except StopIteration as found:
            self._place = found.value
            if self._place in self._read:
                return self._read[self._place]
            self._last = True
        return await self._without(self._cuts.turns[self._place])

    async def _without(self, cut: int) -> Submission:
        """Return the submission without its oldest turns."""
        messages = self._rule.messages
        return await self._with(without_turns(messages, cut), leaving(messages, cut)) if cut else self._submission

    async def _called(self, function: Callable[[OverfullChat], object]) -> Submission:
        messages = self._rule.messages
        chat = OverfullChat(tuple(messages), tuple(turns_of(messages)), self._room)
        kept = await anyio.to_thread.run_sync(function, chat, limiter=self._functions)
        if isinstance(kept, Coroutine):
            kept.close()
        if not isinstance(kept, list | tuple) or not kept or not all(isinstance(one, Mapping) for one in kept):
            fix = "Return a list of messages, such as chat.without(4); a plain function does, not an async one"
            raise InvalidRequest("overflow", kept, "is what the function returned, and no messages", fix)
        self._last = True
        return await self._with(kept, missing(messages, kept))

    async def _with(self, kept: Messages, gone: set[int]) -> Submission:
        """Return the submission with the messages that stay; `gone` are the places of the others."""
        source = await anyio.to_thread.run_sync(self._rule.prompt, kept)
        turns = sum(map(gone.issuperset, turns_of(self._rule.messages)))
        left_out = LeftOut(turns, len(gone), min(gone, default=0), self._context)
        extensions = source.extensions.plus(left_out) if gone else source.extensions
        return self._submission._replace(render=source.render, extensions=extensions, messages=kept)
