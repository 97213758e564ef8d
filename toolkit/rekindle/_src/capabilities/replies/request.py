"""The reply of a chat as a capability of requests: it is read for reasoning and calls of tools."""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rekindle._src.core.extension import NONE, Extension, Extensions
from rekindle._src.core.records import FinishReason, IntArray, Request
from rekindle._src.core.reply import ReasoningDelta, Reply, ReplyEvent, fold
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Fields, Part, SequenceEnd

if TYPE_CHECKING:
    from rekindle._src.text.replies import ReplyPlan, ReplyScanner
    from rekindle._src.text.replies.history import WrittenReplies


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ChatReply(Extension):
    """Of a submission: how a chat's reply is read for reasoning and calls of tools."""

    plan: ReplyPlan = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReasoningBudget(Extension):
    """Of a submission: how many tokens its reasoning may take, and a text that is written before its forced end."""

    tokens: int
    message: str = ""


def reading(extensions: Extensions) -> Extensions:
    """Return the extensions that decide how a chat's reply is read."""
    return Extensions(*(one for kind in (ChatReply, ReasoningBudget) if (one := extensions.get(kind)) is not None))


class ReplyIntake(Capability[None]):
    """A chat's reply is read for reasoning and calls of tools; earlier ones stay as their model wrote them."""

    def __init__(self) -> None:
        self._written: WrittenReplies | None = None  # of this session, once there are any

    def expand(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        if self._written is None or ChatReply not in submission.extensions:
            return token_ids
        salt, caller = submission.sampling.salt, submission.caller
        return self._written.restored(token_ids, front.tokenizer.eos_ids, partial(_decoded, front), salt, caller)

    def part(self, request: Request, submission: Submission, front: Front) -> Part[None] | None:
        reply = submission.extensions.get(ChatReply)
        if reply is None:
            return None
        scanner = reply.plan.scanner(submission.text or "", request.token_ids.tobytes(), request.sampling.seed)
        keep = partial(self._keep, request, submission.caller, reply.plan, front)
        return ReplyOutput(scanner, reply.plan.visible, keep, reading(submission.extensions))

    def _keep(
        self, request: Request, caller: str, plan: ReplyPlan, front: Front, reply: Reply, token_ids: Sequence[int]
    ) -> None:
        if self._written is None:
            from rekindle._src.text.replies.history import WrittenReplies  # chats alone need it

            self._written = WrittenReplies()
        decode, salt = partial(_decoded, front), request.sampling.salt
        self._written.add(request.token_ids, token_ids, reply, plan, decode, salt, caller)


def _decoded(front: Front, token_ids: Sequence[int]) -> str:
    return front.tokenizer.decode(token_ids, skip_special_tokens=False)


_BROKEN = "\ufffd"  # the text of bytes that are no whole character


def _tokens_within(ranges: Iterable[tuple[int, int]], end: SequenceEnd) -> int:
    """Return the number of tokens in half-open ranges of a text. A range of whitespace counts as empty.

    A token is in a range if it wrote part of it, or bytes of a character in it.
    """
    ends, count, last = end.ends, 0, 0

    def begin_of(token: int) -> int:
        return ends[token - 1] if token else 0

    for begin, stop in ranges:
        if not end.text[begin:stop].strip():
            continue
        first = bisect_left(ends, begin)
        if first < len(ends) and begin_of(first) < begin == ends[first]:
            first += 1
        after = min(bisect_left(ends, stop) + 1, len(ends))
        if after - first > 1 and begin_of(after - 1) == begin_of(after - 2):
            # Its text may begin with that of bytes before it, which were no character.
            rest = end.text[begin_of(after - 1) : stop]
            after -= ends[after - 1] > stop and not rest.strip(_BROKEN)
        count += after - max(first, last)
        last = after
    return count


class ReplyOutput(Part[None]):
    __slots__ = (
        "_began", "_clock", "_events", "_keep", "_latest", "_read_by", "_reasoning_seconds", "_scanner", "visible",
    )  # fmt: skip

    def __init__(
        self,
        scanner: ReplyScanner,
        visible: frozenset[str],
        keep: Callable[[Reply, Sequence[int]], None],
        read_by: Extensions = NONE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scanner, self.visible = scanner, visible
        self._read_by = read_by
        self._clock, self._reasoning_seconds = clock, 0.0
        self._began: float | None = None  # when the reasoning began that goes on
        self._latest = 0.0  # when its latest text came
        self._keep = keep  # takes a reply that its model has ended, and its tokens
        self._events: list[ReplyEvent] = []

    def delta(self, text: str, start: int, stop: int, reason: FinishReason | None) -> Fields:
        events = self._scanner.feed(text)
        events += self._scanner.finish() if reason is not None else ()
        self._events += events
        for event in events:
            if isinstance(event, ReasoningDelta):
                self._latest = self._clock()
                self._began = self._latest if self._began is None else self._began
            else:
                self._end_reasoning()
        return {"events": tuple(events)}

    def _end_reasoning(self) -> None:
        if self._began is not None:
            self._reasoning_seconds += self._latest - self._began
            self._began = None

    def completion(self, end: SequenceEnd) -> Fields:
        reply = fold(self._events)
        if end.reason is FinishReason.EOS:
            self._keep(reply, end.tokens[:-1])
        self._end_reasoning()
        tokens = _tokens_within(self._scanner.thoughts, end)
        counted = {"reasoning_tokens": tokens, "reasoning_seconds": self._reasoning_seconds}
        return {"reply": reply, "_read_by": self._read_by, **counted}
