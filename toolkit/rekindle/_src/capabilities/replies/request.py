"""The reply of a chat as a capability of requests: it is read for reasoning and calls of tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rekindle._src.core.extension import Extension
from rekindle._src.core.records import FinishReason, IntArray, Request
from rekindle._src.core.reply import Reply, ReplyEvent, fold
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Fields, Part, SequenceEnd

if TYPE_CHECKING:
    from rekindle._src.text.replies import ReplyPlan, ReplyScanner
    from rekindle._src.text.replies.history import WrittenReplies


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ChatReply(Extension):
    """Of a submission: how a chat's reply is read for reasoning and calls of tools."""

    plan: ReplyPlan


class ReplyIntake(Capability[None]):
    """A chat's reply is read for reasoning and calls of tools; earlier ones stay as their model wrote them."""

    def __init__(self) -> None:
        self._written: WrittenReplies | None = None  # of this session, once there are any

    def expand(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        if self._written is None or ChatReply not in submission.extensions:
            return token_ids
        return self._written.restored(token_ids, front.tokenizer.eos_ids, partial(_decoded, front))

    def part(self, request: Request, submission: Submission, front: Front) -> Part[None] | None:
        reply = submission.extensions.get(ChatReply)
        if reply is None:
            return None
        scanner = reply.plan.scanner(submission.text or "", request.token_ids.tobytes(), request.sampling.seed)
        return ReplyOutput(scanner, reply.plan.visible, partial(self._keep, request, reply.plan, front))

    def _keep(self, request: Request, plan: ReplyPlan, front: Front, reply: Reply, token_ids: Sequence[int]) -> None:
        if self._written is None:
            from rekindle._src.text.replies.history import WrittenReplies  # chats alone need it

            self._written = WrittenReplies()
        self._written.add(request.token_ids, token_ids, reply, plan, partial(_decoded, front))


def _decoded(front: Front, token_ids: Sequence[int]) -> str:
    return front.tokenizer.decode(token_ids, skip_special_tokens=False)


class ReplyOutput(Part[None]):
    __slots__ = ("_events", "_keep", "_scanner", "visible")

    def __init__(
        self, scanner: ReplyScanner, visible: frozenset[str], keep: Callable[[Reply, Sequence[int]], None]
    ) -> None:
        self._scanner, self.visible = scanner, visible
        self._keep = keep  # takes a reply that its model has ended, and its tokens
        self._events: list[ReplyEvent] = []

    def delta(self, text: str, start: int, stop: int, reason: FinishReason | None) -> Fields:
        events = self._scanner.feed(text)
        events += self._scanner.finish() if reason is not None else ()
        self._events += events
        return {"events": tuple(events)}

    def completion(self, end: SequenceEnd) -> Fields:
        reply = fold(self._events)
        if end.reason is FinishReason.EOS:
            self._keep(reply, end.tokens[:-1])
        return {"reply": reply}
