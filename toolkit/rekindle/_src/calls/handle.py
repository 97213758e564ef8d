"""Requests as their caller holds them: a `Handle` for one prompt, a `Batch` for several. Both can be awaited."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from rekindle._src.calls.call import Call
from rekindle._src.calls.prompts import Prompt, at_index
from rekindle._src.capabilities.guides.request import StructuredText
from rekindle._src.capabilities.pictures.request import PromptPictures
from rekindle._src.capabilities.replies.request import ChatReply, ReasoningBudget, reading
from rekindle._src.core import words
from rekindle._src.core.activity import Activity
from rekindle._src.core.captured import Captured
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.foreign_calls import COMPLETIONS, ForeignNames
from rekindle._src.core.left_out import LeftOut
from rekindle._src.core.own_failure import interrupted
from rekindle._src.core.pictures import PictureLike
from rekindle._src.core.records import Completion, FinishReason, Status, TextDelta, Timings, TokenLogprobs, Usage
from rekindle._src.core.reply import ToolCall
from rekindle._src.core.sampling import Sampling
from rekindle._src.core.soft_prompt import EmbeddedPrompt
from rekindle._src.dispatch.backend import Submission
from rekindle._src.dispatch.host import Host, wait
from rekindle._src.dispatch.threads import Mailbox, OneShot, fresh, run_sync
from rekindle._src.views import html
from rekindle.errors import InvalidRequest, QueueFull, RequestAborted, RequestFailed, SessionClosed

if TYPE_CHECKING:
    pass

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
# Unique in the process, so that an id never means two requests, not even of two sessions.
_ids = itertools.count()


class RequestOutput:
    """Text, tokens and log-probabilities of a request. They stay when it is interrupted."""

    id: str
    _mailbox: Mailbox
    _submitted: bool
    _queued: bool  # submitted, or waiting for a place

    @property
    def text(self) -> str:
        """The text so far, of the first sequence; it stays when the request is interrupted.

        This and the other results raise `InvalidRequest` if the request was neither submitted nor awaited.
        """
        return "".join(delta.text for delta in self._first)

    @property
    def content(self) -> str:
        """The answer so far, of the first sequence: the text without reasoning and calls of tools."""
        return "".join(delta.content for delta in self._first)

    @property
    def reasoning(self) -> str:
        """The reasoning so far, of the first sequence."""
        return "".join(delta.reasoning for delta in self._first)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far, of the first sequence."""
        return tuple(call for delta in self._first for call in delta.tool_calls)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids so far, of the first sequence."""
        return tuple(token for delta in self._first for token in delta.token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities so far, of the first sequence, if the request has them."""
        return tuple(entry for delta in self._first for entry in delta.logprobs)

    @property
    def deltas(self) -> tuple[TextDelta, ...]:
        """Every delta so far, of all sequences."""
        self._check_submitted()
        return tuple(self._mailbox.deltas)

    @property
    def _how(self) -> str:
        """How the call is written so that it has results."""
        raise NotImplementedError

    @property
    def _first(self) -> list[TextDelta]:
        self._check_submitted()
        return [delta for delta in self._mailbox.deltas if delta.index == 0]

    def _check_submitted(self) -> None:
        if not (self._queued or self._submitted or self._mailbox.ended):
            raise InvalidRequest(
                "handle",
                self.id,
                "has no results, because it was neither awaited nor submitted",
                self._how,
            )


class DeltaStream(Protocol):
    """A stream of deltas, of one request or of all that a `ToolLoop` makes."""

    def __anext__(self) -> Coroutine[object, None, TextDelta]: ...
    def _leave(self) -> None: ...


class Handle(RequestOutput, Call[T_co]):
    """One prompt's request: await it for its completion, iterate over it for its deltas, cancel it from any thread.

    `submit` queues it at once; otherwise that happens when it is first awaited or iterated, and waits while the queue
    is full. A request is aborted when an await of it is cancelled, and when its handle is dropped. With `n`
    above 1 the result is a list, and the deltas of all sequences come as they are made, each with its `index`.
    """

    def __init__(
        self,
        host: Host,
        session: object,
        prompt: Prompt,
        sampling: Sampling,
        *,
        scoped: bool = False,
    ) -> None:
        self.id: str = f"r{next(_ids)}"
        self.sampling: Sampling = sampling
        self.caller: str = ""  # the caller's name: long prompts and grammars of several callers are taken in by turns
        self._host = host
        self._session: Any = session  # kept open by its handles: a session closes once nothing refers to it
        self._prompt = prompt
        call = "chat" if prompt.messages is not None else "stream" if scoped else "generate"
        self._awaited = f"await session.{call}(…)"
        self._scoped = scoped  # ends with the loop over it
        self._mailbox = Mailbox(sampling.n)
        if prompt.error is not None:
            self._mailbox.complete_all(prompt.error)
        self._lock = threading.RLock()
        self._submitted = False
        self._queued = False  # submitted, or waiting for a place
        self._handed_over: float | None = None  # when it was handed over, or began to wait for a place

    @property
    def _how(self) -> str:
        if self._scoped and self._prompt.messages is None:
            return f"Write async for delta in session.stream(…) and delta.text, or done = {self._awaited} and done.text"
        if self._prompt.messages is not None:
            return f"Write done = {self._awaited} and done.content, or async for delta in session.chat(…) for parts"
        return f"Write done = {self._awaited} and done.text, or handle = session.submit(…) for text so far"

    @property
    def prompt(self) -> str | None:
        """The prompt's text, or None if it has none. A chat's text is rendered when its request is taken in."""
        prompt = self._prompt
        return self._mailbox.prompt if prompt.text is None else prompt.text if prompt.shown is None else prompt.shown

    @property
    def images(self) -> tuple[PictureLike, ...]:
        """The pictures of the prompt, as they were read."""
        given = (self._mailbox.extensions or self._prompt.extensions).get(PromptPictures)
        return () if given is None else given.pictures

    @property
    def embedded(self) -> EmbeddedPrompt | None:
        """The soft prompt, with the places of its rows."""
        return self._prompt.extensions.get(EmbeddedPrompt)

    @property
    def left_out(self) -> LeftOut | None:
        """The turns of a chat that its prompt leaves out for want of room; None until it is taken in."""
        return self._mailbox.extensions.get(LeftOut)

    @property
    def covered(self) -> int:
        """Tokens at the prompt's end that belong to the structured text, in a fork."""
        text = self._prompt.extensions.get(StructuredText)
        return 0 if text is None else text.covered

    # Its state.

    @property
    def done(self) -> bool:
        """True once it has ended: finished, failed or aborted."""
        return self._mailbox.ended

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, or None."""
        return self._mailbox.error

    @property
    def submitted_at(self) -> float | None:
        """When it was submitted or began to wait for a place, by `time.perf_counter()`; None before that."""
        return self._handed_over

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of its sequences, as statistics and step reports name them."""
        return (self.id,) if self.sampling.n == 1 else tuple(f"{self.id}.{index}" for index in range(self.sampling.n))

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's token ids; empty until it is tokenized."""
        ids = self._mailbox.prompt_ids
        return () if ids is None else tuple(ids.tolist())

    @property
    def seed(self) -> int | None:
        """The seed that repeats the draw of the first sequence; None until the request is taken in, if it had none."""
        return self.sampling.seed if self._mailbox.seed is None else self._mailbox.seed

    @property
    def status(self) -> Status:
        """The state of the request, or of the first unfinished sequence if it has several."""
        results = self._mailbox.results
        if self._mailbox.ended:
            error = self._mailbox.error
            if error is None:
                return Status.FINISHED
            return Status.ABORTED if isinstance(error, RequestAborted | SessionClosed) else Status.FAILED
        if not self._submitted:
            return Status.QUEUED
        first = self.request_ids[next((i for i, result in enumerate(results) if result is None), 0)]
        try:
            status = wait(self._host.call(lambda dispatch: dispatch.backend.status(first)))
        except SessionClosed:
            return Status.ABORTED
        # The scheduler does not know it before intake has tokenized it.
        return status or Status.QUEUED

    # Its life.

    def submit(self) -> None:
        """Queue it now. Raise `QueueFull` when there is no place."""
        self._host.check()
        limiter = self._host.limiter
        self._fits()
        if not limiter.try_enter(self.sampling.n, self.caller):
            raise QueueFull(
                f"{limiter.inside} of {limiter.places} places are taken, with "
                f"{words.count(limiter.waiting, 'request')} in line. "
                "Submit later, await session.admit(...), or open with a larger max_queue"
            )
        self._hand_over()

    async def admit(self) -> None:
        """Queue it as soon as there is a place."""
        if self._submitted or self._mailbox.ended:
            return
        self._host.check()
        self._fits()
        self._queued, self._handed_over = True, time.perf_counter()
        try:
            entered = await self._host.limiter.enter(
                self.sampling.n, lambda: self._mailbox.ended or self._submitted, self.caller
            )
        except BaseException:
            self.cancel()
            raise
        if entered:
            self._hand_over()

    def _fits(self) -> None:
        if self.sampling.n > self._host.limiter.places:
            raise InvalidRequest(
                "n", self.sampling.n, f"is over the {self._host.limiter.places} places of the session", "Use fewer"
            )

    def _hand_over(self) -> None:
        with self._lock:
            if self._mailbox.ended or self._submitted:  # cancelled in another thread, or admitted twice
                self._host.limiter.leave(self.sampling.n, self.caller)
                return
            self._mailbox.on_sequence_end = partial(self._host.limiter.leave, caller=self.caller)
            self._submitted, self._handed_over = True, time.perf_counter()
        prompt = self._prompt
        self._host.submit(
            Submission(
                id=self.id,
                text=prompt.text,
                token_ids=prompt.token_ids,
                add_special_tokens=prompt.add_special_tokens,
                sampling=self.sampling,
                mailbox=self._mailbox,
                arrival=self._handed_over,
                render=prompt.render,
                extensions=prompt.extensions,
                messages=prompt.messages,
                long=prompt.long,
                caller=self.caller,
            )
        )

    def cancel(self) -> None:
        """Abort it, from any thread. Awaiting it raises `RequestAborted`. Its text so far stays on the handle."""
        if self._mailbox.ended:
            return
        with self._lock:
            if not self._submitted:
                self._mailbox.complete_all(RequestAborted(f"request {self.id} was cancelled before it was queued"))
                self._host.limiter.recheck()
                return
        self._host.abort(self._mailbox)

    def __del__(self) -> None:
        # An attribute is missing when the constructor raised.
        if getattr(self, "_submitted", False) and not self._mailbox.ended:
            self._host.abort(self._mailbox)

    async def _result(self) -> T_co:
        await self._wait()
        return self.completion()

    def completion(self) -> T_co:
        """Return the result of a request that has ended, without waiting. Raise its error if it has one."""
        if not self._mailbox.ended:
            raise InvalidRequest("handle", self.id, "has not ended", "Await it")
        if (error := self._mailbox.error) is not None:
            raise fresh(error)
        results = self._mailbox.results
        return cast(T_co, results[0] if self.sampling.n == 1 else Completions(results))

    async def _wait(self, count: int | None = None) -> None:
        """Wait for the end, or for more than `count` deltas. Any exception raised in here aborts the request."""
        if not self._mailbox.ended:
            self._host.check_waiting(f"request {self.id}")
        try:
            with contextlib.nullcontext() if self._mailbox.deltas else self._host.program_wait.shown_by_caller():
                await self.admit()
                if count is None:
                    await self._mailbox.wait_all()
                else:
                    await self._mailbox.wait_beyond(count)
        except BaseException as error:
            self.cancel()
            error.__traceback__ = None  # frames below are the client's own; an interrupted cell need not show them
            keep_partial(error, [self], self.so_far)
            raise

    def so_far(self) -> T_co:
        """Return the output so far in the form of the result. A sequence that has not ended counts as aborted."""
        deltas: dict[int, list[TextDelta]] = {}  # by sequence: there may be a thousand, with hundreds of each
        for delta in self._mailbox.deltas:
            deltas.setdefault(delta.index, []).append(delta)
        completions = [self._partial(index, deltas.get(index, [])) for index in range(self.sampling.n)]
        return cast(T_co, completions[0] if self.sampling.n == 1 else Completions(completions))

    def _partial(self, index: int, deltas: Sequence[TextDelta]) -> Completion:
        if isinstance(completion := self._mailbox.results[index], Completion):
            return completion
        ids = tuple(token for delta in deltas for token in delta.token_ids)
        prompt = self.prompt_token_ids
        return Completion(
            id=self.request_ids[index],
            text="".join(delta.text for delta in deltas),
            token_ids=ids,
            finish_reason=FinishReason.ABORTED,
            prompt=self.prompt,
            prompt_token_ids=prompt,
            usage=Usage(len(prompt), 0, len(ids)),
            timings=Timings(0.0, 0.0, 0.0),
            sampling=self.sampling,
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs) or None,
            index=index,
            covered=self.covered,
            _read_by=reading(self._prompt.extensions),
            captured=_captured(deltas),
            left_out=self.left_out,
            embedded=self.embedded,
        )

    def wait_for_more(self, seen: int) -> int:
        """Block this thread until there are more than `seen` deltas or the request ends. Return their number."""
        run_sync(self._mailbox.wait_beyond(seen))
        return len(self._mailbox.deltas)

    def __aiter__(self) -> Stream:
        return Stream(self, self._mailbox, self._wait, scoped=self._scoped)

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError(
                "a stream is asynchronous: write `async for delta in session.stream(…)`, or `for delta in "
                "session.stream_sync(…)` in code without an event loop; for the whole text, await session.generate(…)"
            )

    def stream_sync(self) -> SyncStream:
        """Return an iterator over the deltas that blocks this thread; for code without an event loop."""
        return SyncStream(aiter(self))

    def __repr__(self) -> str:
        state = "ended" if self.done else "submitted" if self._submitted else "not submitted: await it"
        return f"<Handle {self.id}: {state}, {words.count(self._tokens_so_far, 'token')}>"

    @property
    def _text_so_far(self) -> str:
        return "".join(delta.text for delta in self._mailbox.deltas if delta.index == 0)

    @property
    def _tokens_so_far(self) -> int:
        return sum(len(delta.token_ids) for delta in self._mailbox.deltas if delta.index == 0)

    def _repr_html_(self) -> str:
        if not self._mailbox.ended:
            state = self.status if self._submitted else "not submitted: await it, or iterate over it"
            prompt = "" if self.prompt is None else html.text(words.shorten(self.prompt, 200))
            tokens = words.count(self._tokens_so_far, "token")
            return str(html.block(prompt, html.text(self._text_so_far), html.line(self.id, state, tokens)))
        if (error := self._mailbox.error) is not None:
            state = f"{type(error).__name__}: {error}"
            if isinstance(error, RequestAborted):  # an abort is requested: it is no fault
                state = f"stopped after {words.count(self._tokens_so_far, 'token')}"
            return str(html.block(html.text(self._text_so_far), html.line(self.id, state)))
        return str(
            html.block(
                *(
                    completion._repr_html_()
                    for completion in self._mailbox.results
                    if isinstance(completion, Completion)
                )
            )
        )


def _captured(deltas: Sequence[TextDelta]) -> Captured | None:
    """Join the captures of deltas; None if the request captures nothing."""
    parts = [delta.captured for delta in deltas if delta.captured is not None]
    return Captured.joined([part for part in parts if len(part.positions)], parts[0].layers) if parts else None


def keep_partial(error: BaseException, handles: Sequence[Handle[object]], so_far: Callable[[], object]) -> None:
    """Keep the output of interrupted requests as `session.last`, and say so in the interrupt's message."""
    if isinstance(error, Exception):
        return
    tokens = sum(len(delta.token_ids) for handle in handles for delta in handle._mailbox.deltas)
    outcome = "stopped before the first token"
    if tokens:
        handles[0]._session.last = so_far()
        subject = "text is" if len(handles) == 1 else "texts are"
        outcome = f"stopped after {words.count(tokens, 'token')}; the {subject} kept as session.last"
    interrupted(error, outcome)


def chat_of(source: Completion | Handle[Any], text: str) -> dict[str, Any]:
    """Return the chat fields of a fork: the messages, and the reader of the reply that continues after `text`.

    A completion knows no messages.
    """
    if isinstance(source, Handle):
        extensions, messages = source._prompt.extensions, source._prompt.messages
    else:
        extensions, messages = source.reply_reading(), None
    reply, budget = extensions.get(ChatReply), extensions.get(ReasoningBudget)
    continued = None if reply is None else ChatReply(reply.plan.after(source.prompt or "", text))
    return {"messages": messages, "reply": continued, "reasoning": budget}


async def one_ended(handles: Sequence[Handle[object]]) -> None:
    """Wait until one of the requests has ended."""
    for handle in handles:
        if not handle.done:
            handle._host.check_waiting(f"request {handle.id}")
    await Mailbox.wait_any([handle._mailbox for handle in handles])


class Batch(Call[list[T]]):
    """The requests of several prompts: await it for the list of their results.

    If one fails, the others are aborted; with errors="return" they go on, and its error stands in its place.
    """

    _awaited = "await session.generate([…])"

    def __init__(
        self,
        handles: Sequence[Handle[T]],
        *,
        progress: Callable[[Sequence[Mailbox]], Activity] | None = None,
        keep_errors: bool = False,
    ) -> None:
        self.handles: list[Handle[T]] = list(handles)
        self._progress, self._keep_errors = progress, keep_errors

    async def _result(self) -> list[T]:
        if self._progress is None or len(self.handles) < 2:
            return await self._results()
        with self._progress([handle._mailbox for handle in self.handles]):
            return await self._results()

    async def _results(self) -> list[T]:
        failure: OneShot[BaseException] = OneShot()
        for handle in self.handles:
            if not handle.done:
                handle._host.check_waiting(f"request {handle.id}")
        try:
            for handle in self.handles:
                handle._mailbox.failure = None if self._keep_errors else failure
                await handle.admit()
            for handle in self.handles:
                await handle._mailbox.wait_all()
                if failure.filled:
                    error = await failure.get()
                    matches = [error in peer._mailbox.results for peer in self.handles]
                    raise at_index(fresh(error), matches.index(True))
            return Completions(self._outcome(index) for index in range(len(self.handles)))
        except BaseException as error:
            self.cancel()
            error.__traceback__ = None
            keep_partial(error, self.handles, lambda: Completions(handle.so_far() for handle in self.handles))
            raise

    def _outcome(self, index: int) -> Any:
        error = self.handles[index].error
        if self._keep_errors and isinstance(error, InvalidRequest | RequestAborted | RequestFailed):
            return at_index(fresh(error), index)
        return self.handles[index].completion()

    def cancel(self) -> None:
        """Abort all of the requests."""
        for handle in self.handles:
            handle.cancel()

    @property
    def done(self) -> bool:
        """True once all of the requests have ended: finished, failed or aborted."""
        return all(handle.done for handle in self.handles)

    def __repr__(self) -> str:
        ended = sum(handle.done for handle in self.handles)
        return f"<Batch: {ended} of {len(self.handles)} requests ended>"

    def _repr_html_(self) -> str:
        rows = [
            (handle.id, handle.status, handle._tokens_so_far, words.shorten(handle._text_so_far, 100))
            for handle in self.handles
        ]
        return str(html.table(["request", "status", "tokens", "text"], rows))


class Stream(Drawable, AsyncIterator[TextDelta]):
    """An iterator over the deltas of a handle; several can read the same handle, each at its own pace."""

    def __init__(
        self, handle: Handle[object], mailbox: Mailbox, following: Callable[[int], Awaitable[None]], *, scoped: bool
    ) -> None:
        self._handle, self._mailbox = handle, mailbox
        self._following = following  # waits for more deltas than this number
        self._scoped = scoped  # the request ends with the loop over it
        self._seen = 0
        self._ended = False

    def __repr__(self) -> str:
        return f"<Stream of {self._handle!r}, {self._seen} deltas read>"

    async def __anext__(self) -> TextDelta:
        """Wait for the next delta and return it."""
        mailbox, seen = self._mailbox, self._seen
        if seen >= len(mailbox.deltas):
            await self._following(seen)
        if seen < len(mailbox.deltas):
            self._seen = seen + 1
            return mailbox.deltas[seen]
        self._ended = True
        if mailbox.error is not None:
            raise fresh(mailbox.error)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading. The request of `session.stream` is aborted, as it is by `break`."""
        self._leave()

    def _leave(self) -> None:
        if not self._ended and self._scoped:
            self._ended = True
            self._handle.cancel()

    def __del__(self) -> None:
        self._leave()


class SyncStream(Drawable, Iterator[TextDelta]):
    """A stream for code without an event loop: `for` over it blocks this thread."""

    def __init__(self, stream: DeltaStream) -> None:
        self._stream = stream

    def __repr__(self) -> str:
        return f"<Sync{repr(self._stream)[1:]}"

    def __next__(self) -> TextDelta:
        """Return the next delta. Blocks this thread until it is there."""
        try:
            return run_sync(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Stop reading. The request of `session.stream` is aborted, as it is by `break`."""
        self._stream._leave()

    if not TYPE_CHECKING:

        def __aiter__(self) -> NoReturn:
            raise TypeError("stream_sync(…) is for plain `for`; with `async for` use session.stream(…)")


class Completions(ForeignNames, list[T]):
    """A list in every respect; only a notebook shows it otherwise. With n above 1 its items are lists."""

    _foreign = COMPLETIONS

    def __reduce__(self) -> tuple[type[list[T]], tuple[list[T]]]:
        return list, (list(self),)  # pickled as a plain list, so that it is read without this class

    def __repr__(self) -> str:
        text = super().__repr__()
        if len(text) <= 200:
            return text
        completions = [completion for _, completion in _each(self)]
        tokens = words.count(sum(len(completion.token_ids) for completion in completions), "token")
        return f"<Completions: a list of {words.count(len(completions), 'completion')}, {tokens}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = []
        tokens, thumbnails = 0, html.IMAGES
        for number, completion in _each(self):
            tokens += len(completion.token_ids)
            shown = html.images(completion.images, limit=thumbnails)
            thumbnails -= len(completion.images)
            prompt = html.Markup(f"{html.escape(words.shorten(completion.prompt or '', 60))}{shown}")
            cached = f"{completion.usage.cached_tokens:,} of {completion.usage.prompt_tokens:,}"
            rate = completion.timings.decode_rate(len(completion.token_ids))
            speed = f"{rate:,.0f}" if rate else ""
            text = words.shorten(completion.text, 200)
            rows.append((number, prompt, text, len(completion.token_ids), str(completion.finish_reason), cached, speed))
        heads = ["", "prompt", "text", "tokens", "ended by", "cached", "tokens/s"]
        size = html.line(words.count(len(rows), "completion"), words.count(tokens, "token"))
        for index, item in enumerate(self):
            if isinstance(item, BaseException):  # generate(..., errors="return") puts errors in place of completions
                rows.append((str(index), "", f"{type(item).__name__}: {item}", 0, "failed", "", ""))
        rows.sort(key=lambda row: int(str(row[0]).partition(".")[0]))
        return str(html.block(size, html.table(heads, rows)))


def _each(found: list[T]) -> Iterator[tuple[str, Completion]]:
    """Yield completions with their places: `2`, or `2.1` for the second completion of one prompt."""
    for index, item in enumerate(found):
        if isinstance(item, Completion):
            yield str(index), item
        elif isinstance(item, list):
            for place, part in enumerate(item):
                if isinstance(part, Completion):
                    yield f"{index}.{place}", part
