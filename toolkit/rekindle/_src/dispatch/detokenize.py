"""Detokenize: turns token events into text deltas and completions, and puts them into their callers' mailboxes.

A request ends in `_Delivery.end`, whatever ended it, and that can't fail: its outcome is in the mailbox first, and what
it held is closed after that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.activity import NO_WAIT, ProgramWait
from rekindle._src.core.contracts import DetokenizerLike
from rekindle._src.core.own_failure import close_each, own_failure
from rekindle._src.core.records import (
    Completion,
    EmbeddingResult,
    FinishReason,
    Request,
    TextDelta,
    Timings,
    TokenEvent,
    Usage,
)
from rekindle._src.dispatch.backend import Abort, Events, Finish, ScheduleMessage
from rekindle._src.dispatch.capability import Part, SequenceEnd
from rekindle._src.dispatch.threads import Mailbox, OneShot, Outcome, RelayResult
from rekindle.errors import RekindleError, RequestAborted, RequestFailed

_TOKEN_ENDS = (FinishReason.EOS, FinishReason.STOP)
# A request for no tokens ends by its length, regardless of the token that was sampled for it.
_SCORED = dict.fromkeys((FinishReason.EOS, FinishReason.STOP, FinishReason.CONTEXT), FinishReason.LENGTH)


class Output:
    """A live sequence on its way out."""

    __slots__ = ("index", "mailbox", "request", "started")

    def __init__(self, request: Request, mailbox: Mailbox, index: int) -> None:
        self.request, self.mailbox = request, mailbox
        self.index = index  # of its outcome in the mailbox
        self.started = 0.0  # when it first ran

    def begin(self, at: float) -> None:
        """Note that it runs, for the first time or again."""
        self.started = self.started or at

    def take(self, event: TokenEvent, now: float) -> FinishReason | None:
        """Add an event. Return why the sequence ended, if it did."""
        raise NotImplementedError

    def ending(self, reason: FinishReason, error: BaseException | None) -> bool:
        """End the sequence. True if its completion has to wait, as for captures on their way to files; see `whole`."""
        return False

    async def whole(self) -> None:
        """Wait for everything that the completion of an ended sequence needs."""

    @property
    def ended(self) -> bool:
        """True if it has ended and waits to be whole. One that has its outcome is no longer known."""
        return False

    def outcome(self, reason: FinishReason, error: BaseException | None, now: float) -> Outcome:
        """Return the completion of a sequence that ended at `now`, or its one error."""
        raise NotImplementedError

    def abort(self) -> None:
        """Let a sequence that has ended wait no longer; files are completed if their disk lets them."""

    def closings(self, reason: FinishReason) -> Iterable[Callable[[], object]]:
        """Return functions that each release one resource of the sequence. It ended for `reason`."""
        return ()


class OutputState(Output):
    """A live sequence as its caller sees it. Intake makes it; detokenize fills it and completes it.

    Everything but text and tokens is in the `parts` of its capabilities.
    """

    __slots__ = (
        "_cached", "_compiling", "_compiling_first", "_decode", "_delivered", "_detokenizer", "_first", "_program_wait",
        "_stop_reason", "_text", "_tokens", "_versions", "_waits", "parts", "prompt",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        mailbox: Mailbox,
        prompt: str | None,
        detokenizer: DetokenizerLike,
        decode: Callable[[Sequence[int]], str] | None = None,
        program_wait: ProgramWait = NO_WAIT,
        parts: tuple[Part, ...] = (),
    ) -> None:
        super().__init__(request, mailbox, request.index)
        self.prompt, self.parts = prompt, parts
        self._detokenizer = detokenizer
        self._decode = decode  # for the texts of single tokens
        self._tokens: list[int] = []
        self._versions: list[int] = []  # of the weights, for each token
        self._stop_reason: str | int | None = None
        self._text: list[str] = []
        self._delivered = 0  # tokens delivered in deltas
        self._cached = 0
        self._first = 0.0
        self._program_wait = program_wait
        self._compiling = self._compiling_first = self._waited(request.arrival)  # session's waits at intake
        self._waits: list[tuple[Part, OneShot[Any]]] = []  # it has ended, and these parts are not complete yet

    def _waited(self, now: float) -> float:
        return self._program_wait.seconds(now) + self._program_wait.added(self.request.id)

    def begin(self, at: float) -> None:
        super().begin(at - self._program_wait.added(self.request.id))  # it was admitted, and waited for its program

    def take(self, event: TokenEvent, now: float) -> FinishReason | None:
        """Add an event and deliver text that became final. Return why the sequence ended, if it did."""
        reason = event.finish_reason
        if event.token_ids and not self._tokens:
            self._first = now
            self._compiling_first = self._waited(now)
        if self.request.sampling.max_tokens == 0:
            event = event._replace(token_ids=())
            reason = reason and _SCORED.get(reason, reason)
        self._cached = event.cached_tokens
        for part in self.parts:
            part.take(event)
        start = len(self._tokens)
        self._tokens += event.token_ids
        self._versions += [event.weights_version] * len(event.token_ids)
        # An eos or stop token that ended the sequence has no text. A stop string ends it without such a token.
        ends = reason in _TOKEN_ENDS and len(event.token_ids) > 0
        if ends and reason is FinishReason.STOP:
            self._stop_reason = event.token_ids[-1]
            ends = not self.request.sampling.include_stop
        text, stopped = self._detokenizer.push(event.token_ids[:-1] if ends else event.token_ids)
        if stopped is not None:  # drop the tokens after the stop string
            self._cut(self._detokenizer.tokens)
        elif reason is not None:
            text += self._detokenizer.flush()
            stopped = self._detokenizer.stopped
        if stopped is not None and reason not in (FinishReason.ABORTED, FinishReason.FAILED):
            reason, self._stop_reason = FinishReason.STOP, stopped
        if reason is not None:
            released = len(self._tokens)
        else:
            released = max(self._delivered, min(self._detokenizer.released, start + len(event.token_ids)))
        # A request that failed has no closing delta: its reader gets the error instead.
        if text or released > self._delivered or reason not in (None, FinishReason.FAILED):
            self._deliver(text, released, reason)
        return reason

    def _cut(self, count: int) -> None:
        del self._tokens[count:], self._versions[count:]
        for part in self.parts:
            part.cut(count)

    def _deliver(self, text: str, released: int, reason: FinishReason | None) -> None:
        start, self._delivered = self._delivered, released
        self._text.append(text)
        fields: dict[str, Any] = {}
        for part in self.parts:
            fields |= part.delta(text, start, released, reason)
        self.mailbox.put(
            TextDelta(
                request_id=self.request.id,
                text=text,
                token_ids=tuple(self._tokens[start:released]),
                index=self.request.index,
                finish_reason=reason,
                stop_reason=self._stop_reason if reason is FinishReason.STOP else None,
                weights_versions=tuple(self._versions[start:released]),
                **fields,
            )
        )

    def completion(self, reason: FinishReason, now: float) -> Completion | EmbeddingResult:
        """Return the completion of a sequence that ended for `reason` at `now`, or its embedding."""
        request, waited = self.request, self._waited(now)
        usage = Usage(request.prompt_length, self._cached, len(self._tokens))
        timings = Timings(
            queued=self.started - request.arrival,
            first_token=self._first - request.arrival,
            total=now - request.arrival,
            compiling=waited - self._compiling,
            compiling_later=waited - self._compiling_first if self._tokens else 0.0,
        )
        fields: dict[str, Any] = {}
        text = "".join(self._text)
        for part in self.parts:
            if (outcome := part.outcome(usage, timings)) is not None:
                return outcome
            fields |= part.completion(SequenceEnd(reason, text, self._tokens, self._detokenizer.ends))
        usage = dataclasses.replace(usage, reasoning_tokens=fields.pop("reasoning_tokens", 0))
        timings = dataclasses.replace(timings, reasoning=fields.pop("reasoning_seconds", 0.0))
        return Completion(
            id=request.id,
            text=text,
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            prompt=self.prompt,
            prompt_token_ids=tuple(request.token_ids.tolist()),
            usage=usage,
            timings=timings,
            sampling=request.sampling,
            index=request.index,
            stop_reason=self._stop_reason if reason is FinishReason.STOP else None,
            decode=self._decode,
            weights_versions=tuple(self._versions),
            **fields,
        )

    def ending(self, reason: FinishReason, error: BaseException | None) -> bool:
        if error is None and reason not in (FinishReason.ABORTED, FinishReason.FAILED):
            waits = [(part, part.ending(len(self._tokens))) for part in self.parts]
            self._waits = [(part, reply) for part, reply in waits if reply is not None]
        return self.ended

    async def whole(self) -> None:
        for part, reply in self._waits:
            part.take_over(await reply.get())

    def outcome(self, reason: FinishReason, error: BaseException | None, now: float) -> Outcome:
        if error is not None:
            return error
        if reason is FinishReason.ABORTED:
            return RequestAborted(
                f"request {self.request.id} was cancelled after {len(self._tokens)} tokens. "
                "What it had produced is on its handle"
            )
        if reason is FinishReason.FAILED:
            return RequestFailed(f"request {self.request.id} failed after {len(self._tokens)} tokens")
        return self.completion(reason, now)

    @property
    def ended(self) -> bool:
        return bool(self._waits)

    def abort(self) -> None:
        for part, reply in self._waits:
            reply.fail(RequestAborted(f"request {self.request.id} was cancelled while {part.last_work}"))

    def closings(self, reason: FinishReason) -> Iterable[Callable[[], object]]:
        return [partial(part.close, reason, len(self._tokens)) for part in self.parts]


async def run(
    inbox: MemoryObjectReceiveStream[Events],
    feedback: MemoryObjectSendStream[ScheduleMessage],
    outputs: dict[str, Output],
) -> None:
    """Deliver events until the inbox ends.

    `feedback` tells schedule about stop strings, and about text that could not be decoded.
    """
    async with inbox, feedback, anyio.create_task_group() as group:
        delivery = _Delivery(feedback, outputs, group)
        async for batch in inbox:
            now = time.perf_counter()
            for request_id, began in batch.started.items():
                if (output := outputs.get(request_id)) is not None:
                    output.begin(began)
            for event in batch.events:
                delivery.deliver(event, now)
            for callback in batch.then:
                callback()


class _Delivery:
    """Puts texts and outcomes into mailboxes."""

    def __init__(
        self, feedback: MemoryObjectSendStream[ScheduleMessage], outputs: dict[str, Output], group: TaskGroup
    ) -> None:
        self._feedback, self._outputs, self._group = feedback, outputs, group

    def deliver(self, event: TokenEvent, now: float) -> None:
        """Put the text of one event into its mailbox. An event of a sequence that has ended already is dropped."""
        output, error = self._outputs.get(event.request_id), event.error
        if output is None or output.ended:
            return
        try:
            reason = output.take(event, now)
        except BaseException as caught:
            reason, error = FinishReason.FAILED, _failure(output, caught)
        if reason is None:
            return
        self.end(output, reason, error, now)
        if event.finish_reason is None:
            ending: ScheduleMessage = Finish(event.request_id, reason)
            if reason is FinishReason.FAILED:
                ending = Abort(event.request_id)
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the backend has ended
                self._feedback.send_nowait(ending)

    def end(self, output: Output, reason: FinishReason, error: BaseException | None, now: float) -> None:
        """End a sequence: its outcome first, then its resources. A completion with files comes when they are whole."""
        try:
            waits = output.ending(reason, error)
        except BaseException as caught:
            waits, reason, error = False, FinishReason.FAILED, _failure(output, caught)
        if waits:
            self._group.start_soon(self._end_whole, output, reason)
        else:
            self._complete(output, reason, error, now)

    async def _end_whole(self, output: Output, reason: FinishReason) -> None:
        try:
            await output.whole()
        except RekindleError as error:
            self._complete(output, reason, error, time.perf_counter())
        else:
            self._complete(output, reason, None, time.perf_counter())

    def _complete(self, output: Output, reason: FinishReason, error: BaseException | None, now: float) -> None:
        self._outputs.pop(output.request.id, None)
        try:
            outcome = output.outcome(reason, error, now)
        except BaseException as caught:
            reason, outcome = FinishReason.FAILED, _failure(output, caught)
        output.mailbox.complete(output.index, outcome)
        close_each(f"request {output.request.id}", *output.closings(reason))


def _failure(output: Output, caught: BaseException) -> RekindleError:
    return own_failure(caught, f"the text of request {output.request.id} could not be made")


Take = Callable[[TokenEvent, float], object]  # called with an event and the time at which the sequence first ran


class RelayedOutput(Output):
    """A live sequence without a text: tokens are decoded, and stop strings matched, in the process that reads them."""

    __slots__ = ("_take",)

    def __init__(self, request: Request, mailbox: Mailbox, take: Take) -> None:
        super().__init__(request, mailbox, 0)
        self._take = take

    def take(self, event: TokenEvent, now: float) -> FinishReason | None:
        """Pass an event on."""
        self._take(event, self.started)
        return event.finish_reason

    def outcome(self, reason: FinishReason, error: BaseException | None, now: float) -> Outcome:
        return RelayResult(reason) if error is None else error  # its reader knows the reason from the last event
