"""Detokenize: turns token events into text deltas and completions, and puts them into their callers' mailboxes.

A request ends in `_Delivery.end`, whatever ended it, and that can't fail: its outcome is in the mailbox first, and what
it held is closed after that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core import html
from rekindle._src.core.activity import NO_WAIT, ProgramWait
from rekindle._src.core.contracts import DetokenizerLike
from rekindle._src.core.own_failure import close_each, own_failure
from rekindle._src.core.records import (
    Completion,
    EmbeddingResult,
    FinishReason,
    GuideReport,
    Request,
    TextDelta,
    Timings,
    TokenEvent,
    TokenLogprobs,
    Usage,
    Vector,
)
from rekindle._src.core.reply import DeferredParse, ReplyEvent, fold
from rekindle._src.core.tapped import CapturedPart
from rekindle._src.core.taps import Captured
from rekindle._src.dispatch.backend import Abort, Events, Finish, ScheduleMessage
from rekindle._src.dispatch.capture_writer import CaptureWriter
from rekindle._src.dispatch.threads import Mailbox, OneShot, Outcome, RelayResult
from rekindle.errors import NotParsed, NotParsedReason, RekindleError, RequestAborted, RequestFailed

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Structure
    from rekindle._src.text.replies import ReplyScanner

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

    def ending(self, reason: FinishReason, error: BaseException | None) -> OneShot[Captured] | None:
        """Return what the completion of a sequence waits for: its captures on their way to files. None if nothing."""
        return None

    @property
    def ended(self) -> bool:
        """True if it has ended and waits for its files. One that has its outcome is no longer known."""
        return False

    def outcome(
        self, reason: FinishReason, error: BaseException | None, now: float, captured: Captured | None = None
    ) -> Outcome:
        """Return the completion of a sequence that ended at `now`, or its one error. `captured` is in files."""
        raise NotImplementedError

    def abort(self) -> None:
        """Let a sequence that has ended wait for its files no longer; they are completed if their disk lets them."""

    def close(self, reason: FinishReason = FinishReason.ABORTED) -> None:
        """Give up what the sequence held."""


class OutputState(Output):
    """A live sequence as its caller sees it. Intake makes it; detokenize fills it and completes it."""

    __slots__ = (
        "_cached", "_captured", "_captures", "_compiling", "_compiling_first", "_decode", "_delivered",
        "_detokenizer", "_events", "_first", "_guided", "_logprobs", "_pooled", "_program_wait",
        "_prompt_logprobs", "_scanner", "_scores", "_stop_reason", "_structured", "_text", "_tokens",
        "_versions", "_written", "prompt", "writer",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        mailbox: Mailbox,
        prompt: str | None,
        detokenizer: DetokenizerLike,
        decode: Callable[[Sequence[int]], str] | None = None,
        program_wait: ProgramWait = NO_WAIT,
        *,
        scanner: ReplyScanner | None = None,
        structured: TextStructure | None = None,
        writer: CaptureWriter | None = None,
    ) -> None:
        super().__init__(request, mailbox, request.index)
        self.prompt = prompt
        self._detokenizer = detokenizer
        self._decode = decode  # for the texts of single tokens
        self._tokens: list[int] = []
        self._versions: list[int] = []  # of the weights, for each token
        self._structured = structured
        self._guided: list[GuideReport] = []  # one for each token, if the text follows a structure
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._scores = 0  # of them, those delivered
        self._captured: list[CapturedPart] = []
        self._captures = 0  # of them, those delivered
        self.writer = writer  # has what is captured, in place of `_captured`
        self._written: OneShot[Captured] | None = None  # it has ended, and waits for its files
        self._stop_reason: str | int | None = None
        self._text: list[str] = []
        self._scanner = scanner  # reads the reply of a chat
        self._events: list[ReplyEvent] = []
        self._delivered = 0  # tokens delivered in deltas
        self._cached = 0
        self._pooled: Vector | None = None
        self._first = 0.0
        self._program_wait = program_wait
        self._compiling = self._compiling_first = self._waited(request.arrival)  # session's waits at intake

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
            event = dataclasses.replace(event, token_ids=(), logprobs=())
            reason = reason and _SCORED.get(reason, reason)
        self._cached = event.cached_tokens
        self._pooled = event.pooled
        self._prompt_logprobs += event.prompt_logprobs
        if self.writer is None:
            self._captured += event.captured
        else:
            for part in event.captured:
                self.writer.add(part)
        start = len(self._tokens)
        self._tokens += event.token_ids
        self._versions += [event.weights_version] * len(event.token_ids)
        self._logprobs += event.logprobs
        self._guided += event.guided
        # An eos or stop token that ended the sequence has no text. A stop string ends it without such a token.
        ends = reason in _TOKEN_ENDS and len(event.token_ids) > 0
        if ends and reason is FinishReason.STOP:
            self._stop_reason = event.token_ids[-1]
            ends = not self.request.sampling.include_stop
        text, stopped = self._detokenizer.push(event.token_ids[:-1] if ends else event.token_ids)
        if stopped is not None:  # drop the tokens after the stop string
            for entries in (self._tokens, self._versions, self._logprobs, self._guided):
                del entries[self._detokenizer.tokens :]
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

    def _deliver(self, text: str, released: int, reason: FinishReason | None) -> None:
        start, self._delivered = self._delivered, released
        self._text.append(text)
        events = None
        if self._scanner is not None:
            events = self._scanner.feed(text)
            events += self._scanner.finish() if reason is not None else ()
            self._events += events
        self.mailbox.put(
            TextDelta(
                request_id=self.request.id,
                text=text,
                token_ids=tuple(self._tokens[start:released]),
                logprobs=tuple(self._logprobs[start:released]),
                index=self.request.index,
                finish_reason=reason,
                stop_reason=self._stop_reason if reason is FinishReason.STOP else None,
                prompt_logprobs=tuple(self._prompt_logprobs[self._scores :]),
                events=None if events is None else tuple(events),
                captured=self._joined(self._captures),
                weights_versions=tuple(self._versions[start:released]),
            )
        )
        self._scores, self._captures = len(self._prompt_logprobs), len(self._captured)

    @property
    def _end_of_captures(self) -> int:
        """The position after the last one of its captures: steps after a stop string are not part of the output."""
        return self.request.prompt_length + max(0, len(self._tokens) - 1)

    def _joined(self, first: int = 0) -> Captured | None:
        """Return what was captured, from a part on; None if the request captures nothing, or into files."""
        tapped = self.request.tapped
        if tapped is None or not tapped.keys or self.writer is not None:
            return None
        return Captured.joined(self._captured[first:], tapped.layers)

    def completion(
        self, reason: FinishReason, now: float, captured: Captured | None = None
    ) -> Completion | EmbeddingResult:
        """Return the completion of a sequence that ended for `reason` at `now`, or its embedding.

        `captured` are its captures if they are in files.
        """
        request, sampling, waited = self.request, self.request.sampling, self._waited(now)
        usage = Usage(request.prompt_length, self._cached, len(self._tokens))
        timings = Timings(
            queued=self.started - request.arrival,
            first_token=self._first - request.arrival,
            total=now - request.arrival,
            compiling=waited - self._compiling,
            compiling_later=waited - self._compiling_first if self._tokens else 0.0,
        )
        if request.pooling is not None:
            assert self._pooled is not None, f"{request.id} ended without its vector"
            return EmbeddingResult(self._pooled, usage, timings)
        if captured is None and (inside := self._joined()) is not None:
            captured = inside.before(self._end_of_captures)
        text, structured = "".join(self._text), self._structured
        return Completion(
            id=request.id,
            text=text,
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            prompt=self.prompt,
            prompt_token_ids=tuple(request.token_ids.tolist()),
            usage=usage,
            timings=timings,
            sampling=sampling,
            logprobs=tuple(self._logprobs) if sampling.logprobs is not None else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if sampling.prompt_logprobs is not None else None,
            index=request.index,
            stop_reason=self._stop_reason if reason is FinishReason.STOP else None,
            reply=None if self._scanner is None else fold(self._events),
            decode=self._decode,
            forced=tuple(guided.forced for guided in self._guided),
            covered=0 if structured is None else len(structured.before),
            weights_versions=tuple(self._versions),
            captured=captured,
            parsing=None if structured is None else structured.parsing(text, self._tokens, self._guided, reason),
        )

    def ending(self, reason: FinishReason, error: BaseException | None) -> OneShot[Captured] | None:
        if self.writer is not None and error is None and reason not in (FinishReason.ABORTED, FinishReason.FAILED):
            self._written = self.writer.finish(self._end_of_captures)
        return self._written

    def outcome(
        self, reason: FinishReason, error: BaseException | None, now: float, captured: Captured | None = None
    ) -> Outcome:
        if error is not None:
            return error
        if reason is FinishReason.ABORTED:
            return RequestAborted(
                f"request {self.request.id} was cancelled after {len(self._tokens)} tokens. "
                "What it had produced is on its handle"
            )
        if reason is FinishReason.FAILED:
            return RequestFailed(f"request {self.request.id} failed after {len(self._tokens)} tokens")
        return self.completion(reason, now, captured)

    @property
    def ended(self) -> bool:
        return self._written is not None

    def abort(self) -> None:
        if self._written is not None:
            self._written.fail(
                RequestAborted(f"request {self.request.id} was cancelled while its captures were written")
            )

    def close(self, reason: FinishReason = FinishReason.ABORTED) -> None:
        if self.writer is not None:  # its captures stay as far as they came, and are removed if it failed
            self.writer.leave(None if reason is FinishReason.FAILED else self._end_of_captures)


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
            written = output.ending(reason, error)
        except BaseException as caught:
            written, reason, error = None, FinishReason.FAILED, _failure(output, caught)
        if written is None:
            self._complete(output, reason, error, now)
        else:
            self._group.start_soon(self._end_written, output, reason, written)

    async def _end_written(self, output: Output, reason: FinishReason, written: OneShot[Captured]) -> None:
        try:
            captured = await written.get()
        except RekindleError as error:
            self._complete(output, reason, error, time.perf_counter())
        else:
            self._complete(output, reason, None, time.perf_counter(), captured)

    def _complete(
        self,
        output: Output,
        reason: FinishReason,
        error: BaseException | None,
        now: float,
        captured: Captured | None = None,
    ) -> None:
        self._outputs.pop(output.request.id, None)
        try:
            outcome = output.outcome(reason, error, now, captured)
        except BaseException as caught:
            reason, outcome = FinishReason.FAILED, _failure(output, caught)
        output.mailbox.complete(output.index, outcome)
        close_each(f"request {output.request.id}", partial(output.close, reason))


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

    def outcome(
        self, reason: FinishReason, error: BaseException | None, now: float, captured: Captured | None = None
    ) -> Outcome:
        return RelayResult(reason) if error is None else error  # its reader knows the reason from the last event


class TextStructure(NamedTuple):
    """The structure of a request's text, and the parts from which its object is made."""

    structure: Structure
    before: Sequence[int]  # tokens of the prompt that the structure covers already, as in a fork
    decode: Callable[[Sequence[int]], str]
    closes: str | None = None  # the text that ends a model's reasoning

    def parsing(
        self, text: str, tokens: Sequence[int], guided: Sequence[GuideReport], reason: FinishReason
    ) -> DeferredParse:
        """Return the object of a sequence's `text` and `tokens`, which ended for `reason`."""
        if self.before:
            text = self.decode([*self.before, *tokens])
        if self.closes is not None and self.closes in text:
            text = text.partition(self.closes)[2]
        return DeferredParse(text, self.structure.parse, _cut(guided, reason))


def _cut(guided: Sequence[GuideReport], reason: FinishReason) -> NotParsed | None:
    """Return why a text is not whole; None if it is.

    A text that a bound cut is whole only if nothing could follow: 46 may be the beginning of 4600.
    """
    if reason in (FinishReason.EOS, FinishReason.GRAMMAR):
        return None
    if reason.cut:
        if guided and guided[-1].ended:
            return None
        option: NotParsedReason = "max_tokens" if reason is FinishReason.LENGTH else "max_model_len"
        return NotParsed(option, f"{option} cut the text after {html.count(len(guided), 'token')}")
    if reason is FinishReason.STOP:
        return NotParsed("stop", "a stop string or a stop token ended the text")
    return NotParsed("ended", f"the request was {reason}")
