"""The half of a session that makes requests: `generate`, `stream`, `submit`, `admit` and `fork`.

The overloads give each call its type: one prompt gives one completion, a list of prompts a list, and with the keyword
`n` each completion is a list. `n` decides at run time whether there is one: with a value of 1 a completion is no list,
and a type checker knows this for a literal 1 only. An `n` inside a `Sampling` is invisible to type checkers.
"""

# A str is a sequence of strings and 1 is an int: these overlaps are meant, and the overload that is taken stands first.
# mypy: disable-error-code="overload-overlap"
# pyright: reportOverlappingOverload=false

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from rekindle._src.calls.content import PromptOptions, RequestOptions, attach, attach_one, copied, split
from rekindle._src.calls.handle import Batch, Handle, SyncStream, chat_of
from rekindle._src.calls.prompts import PromptLike, parse, parse_one
from rekindle._src.capabilities.guides.request import StructuredText
from rekindle._src.capabilities.replies.request import ChatReply, ReasoningBudget
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.extension import Extension
from rekindle._src.core.options import check_batch, refuse_missing, takes_options
from rekindle._src.core.records import Completion
from rekindle._src.core.sampling import Sampling, SamplingOptions
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.threads import Mailbox
from rekindle.errors import InvalidRequest, RekindleError

Completions = list[Completion]
One = Literal[1] | None


class Requests:
    """The requests to an open model."""

    _host: Host
    _front: Front
    # The output of the last interrupted call: an "aborted" completion, or a list in the form of the call's result.
    last: Any = None

    @overload
    def generate(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completion]: ...
    @overload
    def generate(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completions]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> Batch[Completion]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> Batch[Completions]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        errors: Literal["return"],
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> Batch[Completion | RekindleError]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        errors: Literal["return"],
        n: int,
        **options: Unpack[RequestOptions],
    ) -> Batch[Completions | RekindleError]: ...
    @takes_options(Sampling, also=PromptOptions, returns="Handle[Completion] | Batch[Completion]")
    def generate(
        self,
        prompt: PromptLike | Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        errors: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> Any:
        """Await it for the completion of a prompt, or for a list of them if `prompt` is a list of prompts.

        A prompt is a string, a list of token ids, or a `SoftPrompt` of these and rows of numbers. `images` are its
        pictures, one or a list: each takes the place of one "<image>" in the text, or they come first; token ids have
        the model's own placeholder for each. With a list of prompts, `images` has an entry for each. With `n` above 1
        each completion is a list of n. Waits for a place while the queue is full. Returns a `Handle` (a `Batch` for a
        list): see there for partial text and `cancel`. A prompt of a list that fails ends the whole list; with
        errors="return" its error stands in its place instead.
        """
        if errors not in ("raise", "return"):
            raise InvalidRequest("errors", errors, "is not known", "Use 'raise' or 'return'")
        content, others = split(options)
        options_ = sampling_of(self._front, sampling, others)
        self._host.check()
        prompts, many = parse(prompt, keep_errors=errors == "return", soft=True)
        check_batch(len(prompts), options_.n)
        if errors == "return" and not many:
            raise InvalidRequest("errors", errors, "is for a list of prompts", "Pass [prompt], or leave it out")
        text = structured_text(self._front, options_)
        prompts = attach(self._front, prompts, content, many=many, keep_errors=errors == "return")
        handles: list[Handle[Any]] = [Handle(self._host, self, item.plus(text), options_) for item in prompts]
        batch: Batch[Any] = Batch(handles, progress=shown(self._front, options_), keep_errors=errors == "return")
        return batch if many else handles[0]

    @overload
    def stream(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completion]: ...
    @overload
    def stream(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completions]: ...
    @takes_options(Sampling, also=PromptOptions, returns="Handle[Completion]")
    def stream(self, prompt: PromptLike, sampling: Sampling | None = None, /, **options: Any) -> Any:
        """Iterate over it with `async for` for deltas of final text. Leaving the loop early aborts the request."""
        return self._handle(prompt, sampling, options, scoped=True)

    @overload
    def submit(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completion]: ...
    @overload
    def submit(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completions]: ...
    @takes_options(Sampling, also=PromptOptions, returns="Handle[Completion]")
    def submit(self, prompt: PromptLike, sampling: Sampling | None = None, /, **options: Any) -> Any:
        """Queue a request now, from any thread. Raise `QueueFull` rather than wait.

        Keep the handle that it returns: the request is aborted when it is dropped.
        """
        handle = self._handle(prompt, sampling, options)
        handle.submit()
        return handle

    @overload
    async def admit(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completion]: ...
    @overload
    async def admit(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> Handle[Completions]: ...
    @takes_options(Sampling, also=PromptOptions, returns="Handle[Completion]")
    async def admit(self, prompt: PromptLike, sampling: Sampling | None = None, /, **options: Any) -> Any:
        """Queue a request like `submit`, but wait while the queue is full, which slows down its producer."""
        handle = self._handle(prompt, sampling, options)
        await handle.admit()
        return handle

    @overload
    def fork(
        self,
        source: Completion | Handle[Any],
        *,
        at: int,
        edit: str | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        n: One = None,
        **options: Unpack[SamplingOptions],
    ) -> Handle[Completion]: ...
    @overload
    def fork(
        self,
        source: Completion | Handle[Any],
        *,
        at: int,
        edit: str | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        n: int,
        **options: Unpack[SamplingOptions],
    ) -> Handle[Completions]: ...
    @takes_options(Sampling, returns="Handle[Completion]")
    def fork(
        self,
        source: Completion | Handle[Any],
        *,
        at: int,
        edit: str | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Any:
        """Continue from token `at` of a finished or running completion. The pages of the tokens before it are shared.

        `edit` replaces the tokens from `at` on. The source's sampling is kept, its seed included, except for the
        options given here: since a token's random numbers depend on seed and position alone, an unchanged fork repeats
        the source. `max_tokens` becomes the rest of the source's. The reply of a chat is read on for reasoning and
        calls, and its budget of reasoning counts on; copies of a completion, as pickles are, don't know them. Returns a
        submitted handle. Numbers that `mirostat` and `adaptive_target` carry from token to token begin anew in it.
        """
        refuse_missing(Requests.fork, source=source)
        prompt_ids, tokens = source.prompt_token_ids, source.token_ids
        base = dataclasses.replace(source.sampling, seed=source.seed)
        if not prompt_ids:
            raise InvalidRequest("source", source.id, "has not started", "Wait for its first token")
        if not 0 <= at <= len(tokens):
            raise InvalidRequest("at", at, f"is outside of the {len(tokens)} tokens so far", f"Use 0 to {len(tokens)}")
        tokenizer = self._front.tokenizer
        edited = tokenizer.encode(edit, add_special_tokens=False) if isinstance(edit, str) else list(edit or ())
        if sampling is None:
            remaining = max(1, base.max_tokens - at - len(edited))
            sampling = dataclasses.replace(
                base, max_tokens=remaining, min_tokens=min(remaining, max(0, base.min_tokens - at - len(edited))), n=1
            )
        prefix = [*tokens[:at], *edited]
        text = tokenizer.decode(prefix, skip_special_tokens=False) if tokenizer.has_text else ""
        chat, covered = chat_of(source, text), source.covered + len(prefix)
        if covered and base.structured and isinstance(source, Completion):
            _check_copy(source, same_structure(sampling_of(self._front, sampling, options), base))
        handle = self._handle(
            [*prompt_ids, *prefix], sampling, options, base=base, covered=covered, copied=copied(source), **chat
        )
        handle.submit()
        return handle

    def _handle(
        self,
        prompt: PromptLike,
        sampling: Sampling | None,
        options: Mapping[str, Any],
        *,
        scoped: bool = False,
        base: Sampling | None = None,
        covered: int = 0,
        reply: ChatReply | None = None,
        reasoning: ReasoningBudget | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        copied: Extension | None = None,
    ) -> Handle[Any]:
        """Return a handle that is not submitted yet.

        In a fork the last `covered` tokens of the prompt belong to the structured text of the options `base`, which
        goes on if the request has the same structure. A fork of a chat has its `messages` and the budget of its
        `reasoning`, and its `reply` goes on.
        The tokens of the `copied` content are in the prompt already.
        """
        content, others = split(options) if base is None else (PromptOptions(), options)
        merged = sampling_of(self._front, sampling, others)
        self._host.check()
        parsed, text = parse_one(prompt, soft=True), structured_text(self._front, merged)
        if text is not None and base is not None and same_structure(merged, base):
            text = dataclasses.replace(text, covered=covered)
        parsed = attach_one(self._front, parsed, content)
        parsed = dataclasses.replace(parsed, messages=messages).plus(text).plus(reply).plus(reasoning).plus(copied)
        return Handle(self._host, self, parsed, merged, scoped=scoped)

    @overload
    def generate_sync(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...
    @overload
    def generate_sync(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> Completions: ...
    @overload
    def generate_sync(
        self,
        prompt: Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> Completions: ...
    @overload
    def generate_sync(
        self,
        prompt: Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> list[Completions]: ...
    @overload
    def generate_sync(
        self,
        prompt: Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        errors: Literal["return"],
        n: One = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion | RekindleError]: ...
    @overload
    def generate_sync(
        self,
        prompt: Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        errors: Literal["return"],
        n: int,
        **options: Unpack[RequestOptions],
    ) -> list[Completions | RekindleError]: ...
    @takes_options(Sampling, also=PromptOptions, returns="Completion | list[Completion]")
    def generate_sync(
        self,
        prompt: PromptLike | Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        errors: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> Any:
        """Run `generate` from code without an event loop: blocks this thread until the result is there."""
        keywords: Any = {"errors": errors, **options}
        call: Handle[Any] | Batch[Any] = self.generate(prompt, sampling, **keywords)  # type: ignore[arg-type]
        return call.result_sync()

    @takes_options(Sampling, also=PromptOptions)
    def stream_sync(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        /,
        *,
        n: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> SyncStream:
        """Run `stream` from code without an event loop: `for` over it blocks this thread."""
        merged = options if n is None else {**options, "n": n}
        return self._handle(prompt, sampling, merged, scoped=True).stream_sync()


def structured_text(front: Front, sampling: Sampling, *, calls: bool = False) -> StructuredText | None:
    """Return the structure that the options require of the text, checked as far as possible without compiling it.

    It may be the grammar of `calls` that have to be made.
    """
    if not sampling.structured:
        return None
    from rekindle._src.structured.spec import structure_of  # few requests need it

    structure = structure_of(sampling)
    if structure is not None and not front.tokenizer.has_text:
        kind = structure.spec.kind
        raise InvalidRequest(kind, getattr(sampling, kind), "needs a tokenizer", "Open a model with tokenizer.json")
    return None if structure is None else StructuredText(structure, calls=calls)


def _check_copy(source: Completion, goes_on: bool) -> None:
    """Raise `InvalidRequest` if the structure of a fork `goes_on` and its source doesn't know where it begins."""
    if goes_on and source.reasoning and not source.reply_reading():
        problem = "is a copy, which doesn't know where its structure begins after the reasoning"
        raise InvalidRequest("source", source.id, problem, "Fork the original or its handle, or pass schema=None")


def same_structure(left: Sampling, right: Sampling) -> bool:
    """True if both have the same structure, so that a fork continues the structure of its source."""
    from rekindle._src.structured.spec import structure_of

    first, second = structure_of(left), structure_of(right)
    return first is not None and second is not None and first.spec == second.spec


def sampling_of(front: Front, sampling: Sampling | None, options: Mapping[str, Any], *, chat: bool = False) -> Sampling:
    """Return the request's options. Without a `Sampling`, they default to the options of the checkpoint, or of a
    `chat`.

    In that case None leaves an option at its default there, as leaving it out does.
    """
    default = front.chat_sampling if chat else front.sampling
    if sampling is not None or default is None:
        return Sampling.of(sampling, options)
    return Sampling.of(default, {name: value for name, value in options.items() if value is not None})


def shown(front: Front, sampling: Sampling) -> Callable[[Sequence[Mailbox]], Activity]:
    """Return a function that shows a batch of requests with these options while it runs."""

    def show(mailboxes: Sequence[Mailbox]) -> Activity:
        return Activity(BatchProgress(mailboxes, sampling, front.program_wait.describe).look, quiet=front.config.quiet)

    return show


class BatchProgress:
    """Reads the mailboxes of a batch. A look costs as much as the deltas that came since the last one."""

    def __init__(self, mailboxes: Sequence[Mailbox], sampling: Sampling, compiling: Callable[[], str] = str) -> None:
        self._mailboxes, self._pace = mailboxes, Pace(compiling)
        self._most = max(1, sampling.max_tokens) * sampling.n  # tokens of a prompt
        self._read = [0] * len(mailboxes)  # deltas that were counted
        self._tokens = [0] * len(mailboxes)

    def look(self) -> State:
        """Return the batch's progress as one line, and the share that is complete."""
        for index, mailbox in enumerate(self._mailboxes):
            new = mailbox.deltas[self._read[index] :]
            self._read[index] += len(new)
            self._tokens[index] += sum(len(delta.token_ids) for delta in new)
        ended = [mailbox.ended for mailbox in self._mailboxes]
        # A running prompt counts for its share of max_tokens.
        shares = zip(ended, self._tokens, strict=True)
        fraction = sum(1.0 if end else min(1.0, tokens / self._most) for end, tokens in shares) / len(ended)
        words = self._pace.look(sum(self._tokens), fraction)
        return State(", ".join([f"{sum(ended)} of {len(ended)} prompts", *words]), fraction)


class Pace:
    """Tracks the rate of tokens since the first one, without the time when all requests waited for a program, and the
    time left.

    The time left follows from the progress since there was any, or from its latest half, so that a slow beginning does
    not count or is soon forgotten.
    """

    def __init__(self, compiling: Callable[[], str] = str) -> None:
        self._compiling = compiling
        self._first: int | None = None  # the first count of tokens above zero
        self._latest = (0.0, 0)  # the time of the last look, and its count of tokens
        self._running = 0.0  # seconds
        self.marks: deque[tuple[float, float]] = deque()  # shares, each with the seconds at which it was first seen

    def look(self, total: int, fraction: float | None) -> list[str]:
        """Return the rate, the time left and the program in compilation, from all tokens and the share so far.

        If the share is unknown (None), no time left is returned.
        """
        now, compiling, words = time.monotonic(), self._compiling(), []
        previous, counted = self._latest
        self._latest = now, total
        if self._first is None:
            if total:
                self._first = total
                self._left(fraction or 0.0)
        else:
            self._running += now - previous if total > counted or not compiling else 0.0
            if total > self._first and self._running:
                words.append(f"{(total - self._first) / self._running:,.0f} tokens/s")
            left = None if fraction is None else self._left(fraction)
            if left is not None and not compiling:
                words.append(f"{left:,.0f} s left")
        return [*words, compiling] if compiling else words

    def _left(self, fraction: float) -> float | None:
        """Return the seconds left at a share; None while nothing is known of its growth."""
        if fraction and (not self.marks or fraction * 63 / 64 > self.marks[-1][0]):  # so that they stay few
            self.marks.append((fraction, self._running))
        while len(self.marks) > 2 and self.marks[1][0] <= fraction / 2:
            self.marks.popleft()
        share, since = self.marks[0] if self.marks else (fraction, 0.0)
        return (self._running - since) / (fraction - share) * (1 - fraction) if fraction > share else None
