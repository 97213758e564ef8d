"""The records of a request on its way: Request → StepPlan → StepResult → TokenEvent → TextDelta → Completion.

Index ranges are half-open. Records are immutable, and the tasks exchange nothing else.

A guide decides token by token how the text of one request may go on. A grammar is compiled once and gives each sequence
its own guide, which the scheduler keeps with the sequence. Only the device's thread reads it and moves it on: it fills
a step's mask once the tokens of the step before have been read, which is before the scheduler learns of them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.captured import Captured
from rekindle._src.core.drawable import Drawable, Record
from rekindle._src.core.extension import NONE, DeviceLoad, Extensions
from rekindle._src.core.foreign_calls import COMPLETION, DELTA, ForeignNames, of_item
from rekindle._src.core.left_out import LeftOut
from rekindle._src.core.pictures import PictureLike, PicturePatch, patches_of, picture_runs
from rekindle._src.core.prefix import PageNamespace, Prefix
from rekindle._src.core.repetition import Repetition, repetition
from rekindle._src.core.reply import (
    ContentDelta,
    DeferredParse,
    ReasoningDelta,
    Reply,
    ReplyEvent,
    ReplyMessage,
    ToolCall,
    ToolCallDropped,
    fold,
)
from rekindle._src.core.report import NO_REPORTS, Report, Reports, joined
from rekindle._src.core.sampling import Sampling
from rekindle._src.core.soft_prompt import EmbeddedPrompt
from rekindle.errors import NotParsed

T = TypeVar("T")
Mask = NDArray[np.int32]  # one bit for each token of the vocabulary, the lowest bit first: 1 allows it


def mask_words(vocab: int) -> int:
    """Return the length of a mask in integers of 32 bits."""
    return -(-vocab // 32)


class GuideReport(NamedTuple):
    """The report of a guide on a token that it took."""

    forced: bool = False  # no other text could have come
    ended: bool = False  # no token may follow
    by_eos: bool = False  # it ended with the model's end of sequence
    accepting: bool = False  # the text so far is complete, even if more may follow
    ahead: tuple[int, ...] = ()  # tokens that must follow, in the tokenizer's usual spelling
    problem: str = ""  # the reason why it can't go on
    steered: bool = False  # some allowed tokens were masked to end the text in time
    searched: float = 0.0  # CPU seconds of the search for an end, before this token
    due: float = 0.0  # expected seconds of the search for an end before one of the next tokens
    seconds: float = 0.0  # CPU seconds for its mask and for moving on, `searched` included; 0 where it was quick


class GuideLike(Protocol):
    """Follows the text of one sequence."""

    spent: float  # CPU seconds since it last took a token, counted by its caller

    @property
    def consumed(self) -> int:
        """The number of the sequence's own tokens that it has taken."""
        ...

    @property
    def ended(self) -> bool:
        """True if no token may follow."""
        ...

    def fill(self, mask: Mask) -> str:
        """Write the tokens that may come next; return the reason if there are none, else an empty string."""
        ...

    def consume(self, token: int) -> GuideReport:
        """Move on by one token."""
        ...

    def copy(self) -> GuideLike:
        """Return another guide in the same place, for another sequence, or to look ahead."""
        ...


class NewGuide(GuideLike, Protocol):
    """A guide with settable counts: prompt tokens that it has taken do not count as tokens of its sequence."""

    consumed: int
    ended: bool

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens that must follow, in the tokenizer's usual spelling."""
        ...


IntArray = NDArray[np.int32]
Vector = NDArray[np.float32]
Pooling = Literal["mean", "last", "cls"]


class FinishReason(enum.StrEnum):
    """The reason why a request ended; each request has exactly one."""

    EOS = "eos"  # the model's own end-of-sequence token, which is not part of the text
    STOP = "stop"  # a stop string or a stop token id
    GRAMMAR = "grammar"  # the text is complete: its schema, grammar, regex or choice lets nothing follow
    LENGTH = "length"  # max_tokens
    CONTEXT = "context"  # max_model_len
    ABORTED = "aborted"  # cancelled by its caller or by closing
    FAILED = "failed"  # the error is on the event

    @property
    def cut(self) -> bool:
        """True if a limit on its length cut the text."""
        return self in (FinishReason.LENGTH, FinishReason.CONTEXT)


_SILENT = "it said nothing: a model that was trained on chats answers session.chat([…])"


def describe_end(reason: FinishReason) -> str:
    """Return how a text ended, in words; they say if it was cut."""
    bound = {FinishReason.LENGTH: "max_tokens", FinishReason.CONTEXT: "the end of the context"}.get(reason)
    return f"ended by {reason}" if bound is None else f"cut at {bound}"


class Status(enum.StrEnum):
    """The state of a request between submission and its end."""

    QUEUED = "queued"  # waits for a slot, for pages, or for a prefix that another request is computing
    LOADING = "loading"  # cached pages are on their way to the device
    PREFILL = "prefill"  # its prompt is being computed
    DECODE = "decode"  # produces tokens
    PREEMPTED = "preempted"  # lost its pages to an older request; resumes from the cache
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


class WaitingRequest(NamedTuple):
    """A request that no step computes now."""

    id: str
    status: Status
    seconds: float  # since its submission
    prompt_tokens: int
    reason: str  # why it waits, in words


class ResumeState(NamedTuple):
    """The state of a sequence that another process had to give up. It continues from there, as after a preemption."""

    token_ids: IntArray  # tokens generated so far
    scored: int = 0  # prompt positions with delivered log-probabilities


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, validated and tokenized; `n=3` arrives as three requests of one group."""

    id: str  # opaque and unique in the process
    token_ids: IntArray  # the prompt, at least one token
    sampling: Sampling  # with its seed drawn
    stop_ids: frozenset[int] = frozenset()  # end the request with "stop"
    eos_ids: frozenset[int] = frozenset()  # end the request with "eos"; empty under ignore_eos
    arrival: float = 0.0  # time.perf_counter() at submit
    group: str = ""  # shared by the n sequences of one prompt
    index: int = 0  # of the sequence among the n
    resumed: ResumeState | None = None  # if it began in another process
    caller: str = ""  # grammars of several callers are compiled by turns
    messages: Sequence[Mapping[str, object]] | None = None  # of a chat, for routing
    extensions: Extensions = NONE  # of the capabilities that it uses

    @property
    def namespace(self) -> PageNamespace:
        """The requests that it shares pages with."""
        return PageNamespace(self.sampling.salt, self.extensions.altered)

    @property
    def prompt_length(self) -> int:
        return len(self.token_ids)

    @property
    def begun(self) -> IntArray:
        """The tokens that it begins with: its prompt, and what another process has generated after it."""
        resumed = self.resumed
        return self.token_ids if resumed is None else np.concatenate([self.token_ids, resumed.token_ids])

    def prefix(self, page_size: int) -> Prefix:
        """Return the tokens that it begins with as prefix trees know them."""
        return Prefix(self.extensions.names(self.begun, page_size), self.namespace)

    @property
    def generates(self) -> bool:
        """False if its prompt is computed for its own sake: it samples nothing, and shares no pages."""
        return self.extensions.generates

    @property
    def reusable(self) -> int:
        """Leading tokens of its prompt with pages that may come from the cache; the results of all others are read."""
        return self.extensions.reusable(self.prompt_length)


class SlotPair(NamedTuple):
    """The slots of a side cache that a row reads an entry from, and writes the next entry to."""

    reads: int
    writes: int


class PageRun(NamedTuple):
    """The pages of a side cache that a row reads and writes, and the index of the first within its sequence."""

    first: int
    pages: IntArray


HIDDEN_KEPT = 64  # latest hidden states of each request that stay on the device for a drafter that reads them
# The most tokens that the head's entries may lag. A step that catches up stores hidden states of its own rows, too, so
# this is less than `HIDDEN_KEPT`.
MOST_MISSING = 48


class Row(NamedTuple):
    """One sequence's part in a step: computes positions [start, start + length)."""

    request: Request
    epoch: int  # counts how often the request was (re)admitted; a late result of an older epoch is dropped
    slot: int  # the place of its state on the device
    start: int  # tokens that already have keys and values in the cache
    length: int  # tokens computed now; 1 in a decode row
    pages: IntArray  # its page table, long enough for start + length
    token_ids: IntArray | None  # the tokens to compute; None: the token that the slot sampled last, on the device
    samples: bool  # the last position's logits choose the next token
    fresh: bool = False  # first row of this epoch: the slot's state is still another request's and is reset
    generated: int = 0  # tokens that the request generated before this step
    outputs: IntArray | None = None  # in a fresh row, the tokens generated in earlier epochs, if there are any
    kept: bool = False  # a shared page holds its only token's keys and values already: only the logits are needed
    draft: bool = False  # its token was proposed by a drafter and follows the row before, of the same request
    sides: tuple[SlotPair | PageRun, ...] = ()  # its slots or pages in each side cache of the session


class PageMove(NamedTuple):
    """A page that changes its tier around a step, with the digest that names its content."""

    page: int
    digest: bytes
    side: int | None = None  # the number of the side cache that has the slot `page`; None: it is a page


class PageCopy(NamedTuple):
    """A page of a row, and another page on the device that already has its first tokens."""

    source: int
    page: int


class DraftTask(NamedTuple):
    """The work of a drafter for one request before a step: the tokens that it reads, and the drafts after them.

    A small model reads the tokens that it has not seen yet; an assistant and the model's own head read the last token
    alone. Drafted tokens are written into the rows `drafts`.
    """

    row: Row  # of the request's next token
    start: int  # the place of the first token
    tokens: IntArray
    drafts: tuple[Row, ...] = ()

    @property
    def request(self) -> Request:
        return self.row.request

    @property
    def pages(self) -> IntArray:
        """The page table of the request's rows, long enough for the drafts."""
        return (self.drafts or (self.row,))[-1].pages


class EntryLag(NamedTuple):
    """The part of a row in a step that computes a drafter's entries: see `drafts.entries`."""

    missing: int  # entries of earlier tokens that were not computed yet
    following: int = -1  # the token after its last one, if it does not sample that


NOBODY: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step. Order on the device: offload reads, then restore writes, then copies, then the rows."""

    step: int
    decode: tuple[Row, ...]
    prefill: tuple[Row, ...]
    offload: tuple[PageMove, ...] = ()  # pages to read out, because this step may overwrite them
    restore: tuple[PageMove, ...] = ()  # pages to fill from the host tier before the rows run
    sides_out: tuple[PageMove, ...] = ()  # slots of side caches to read out as `offload`
    sides_in: tuple[PageMove, ...] = ()  # and to fill as `restore`
    loads: tuple[DeviceLoad, ...] = ()  # what to put on the device before the rows run
    copies: tuple[PageCopy, ...] = ()  # pages to copy on the device before the rows run
    tasks: tuple[DraftTask, ...] = ()  # of the drafter that computes on the device, before the rows run
    awaited: frozenset[str] = NOBODY  # requests with a token that a drafter needs before the next step is planned
    entries: Mapping[int, EntryLag] | None = None  # by slot; None: the step computes no entries for a drafter
    # Decode steps that the device takes one after the other: `decode` has so many rows of each request, which follow
    # each other. More than one only without prompts.
    steps: int = 1

    @property
    def first_decode(self) -> tuple[Row, ...]:
        """The decode rows of the first of its steps."""
        return self.decode if self.steps == 1 else self.decode[:: self.steps]

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.decode + self.prefill

    @property
    def prefill_tokens(self) -> int:
        return sum(row.length for row in self.prefill)

    @property
    def tokens(self) -> int:
        return len(self.decode) + self.prefill_tokens

    @property
    def drafted(self) -> bool:
        """True if it checks drafts, or a drafter needs the token of one of its rows."""
        return bool(self.awaited) or any(row.draft for row in self.decode)

    @property
    def holds_next(self) -> bool:
        """True if the next step is planned only when this one's result is known: it has drafts, or so many steps that
        another request should wait for no more than these."""
        return self.steps > 1 or self.drafted


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TokenLogprobs(Record):
    """One token's log-probability and the most likely alternatives, most likely first."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    of_ids: tuple[float, ...] = ()  # of the request's `logprob_token_ids`, in their order
    # With logprobs_of="sampled", a bit for each token that could be drawn, as `np.packbits(…, bitorder="little")` gives
    support: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def support_ids(self) -> IntArray:
        """The tokens that could be drawn, with logprobs_of="sampled"; else empty."""
        bits = np.unpackbits(np.frombuffer(self.support, np.uint8), bitorder="little")
        return np.flatnonzero(bits).astype(np.int32)


class RowResult(NamedTuple):
    """The result of a row: a token if it sampled, and log-probabilities if the request asks for them."""

    request_id: str
    epoch: int
    token_id: int | None
    reports: Reports = NO_REPORTS  # of the step's features
    error: Exception | None = None  # the row could not be prepared: the step ran without it, and its request fails
    finite: bool = True  # False: its numbers are NaN or infinite, so that it has no token

    @property
    def delivers(self) -> bool:
        """True if it has a part for the caller."""
        return self.token_id is not None or bool(self.reports)

    def event(
        self, cached_tokens: int, finish_reason: FinishReason | None = None, weights_version: int = 0
    ) -> TokenEvent:
        """Return the part for the caller."""
        tokens = () if self.token_id is None else (self.token_id,)
        return TokenEvent(self.request_id, tokens, self.reports, cached_tokens, finish_reason, None, weights_version)

    def reporting(self, report: Report[T], *values: T) -> RowResult:
        """Return the result with these values of a report."""
        reports = dict(self.reports)
        report.put(reports, *values)
        return RowResult(self.request_id, self.epoch, self.token_id, reports, self.error, self.finite)


class LostPage(NamedTuple):
    """A page of `StepPlan.restore` that could not be filled; the step ran without it."""

    move: PageMove
    error: Exception


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, in the order of `plan.rows`."""

    plan: StepPlan
    rows: tuple[RowResult, ...]
    program: str = ""  # the bucket's name
    host_seconds: float = 0.0  # packing and dispatch
    device_seconds: float = 0.0  # from dispatch until its result was ready
    idle_seconds: float = 0.0  # the device had nothing to do before it
    lost: tuple[LostPage, ...] = ()  # every request that holds one of these pages fails
    # Wall time without its guides: from the previous step's result, or its own beginning, until its result was read.
    seconds: float = 0.0
    lost_sides: tuple[LostPage, ...] = ()  # every request that was to continue one of these entries fails

    @property
    def valid(self) -> tuple[bool, ...]:
        """A flag for each row: False if it failed, or if it is a draft after a rejected one."""
        valid: list[bool] = []
        for index, row in enumerate(self.plan.rows):
            is_valid = self.rows[index].error is None
            if row.draft:
                assert row.token_ids is not None, "a draft has its token"
                is_valid = is_valid and valid[-1] and self.rows[index - 1].token_id == row.token_ids[0]
            valid.append(is_valid)
        return tuple(valid)

    @property
    def sampled(self) -> int:
        """The number of tokens that it added to its requests."""
        return sum(row.samples and valid for row, valid in zip(self.plan.rows, self.valid, strict=True))


class TokenEvent(NamedTuple):
    """New tokens of one request from the scheduler; the last event says how the request ended."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    reports: Reports = NO_REPORTS  # of features, on its tokens and on its prompt
    cached_tokens: int = 0  # of the prompt, taken from the cache
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    weights_version: int = 0  # of its tokens: how often weights had been swapped

    def merged_with(self, later: TokenEvent) -> TokenEvent:
        """Return this event and a later one of the same request, merged into one."""
        reports = joined(self.reports, later.reports)
        return later._replace(token_ids=self.token_ids + later.token_ids, reports=reports)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TextDelta(Record, ForeignNames):
    """An item of a stream: text that is final, with the tokens that became final with it."""

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # with finish_reason "stop": the stop string or the stop token's id
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with a sequence's first delta, if requested
    # In a chat that reads the reply for reasoning or calls; `text` is then all text of the model.
    events: tuple[ReplyEvent, ...] | None = None
    captured: Captured | None = None  # of the positions that were computed since the delta before, if requested
    weights_versions: tuple[int, ...] = ()  # of each token: how often weights had been swapped when it was chosen

    _foreign = DELTA

    if not TYPE_CHECKING:

        def __getitem__(self, name: object) -> NoReturn:
            raise TypeError(f"a delta has no items. {of_item(DELTA, name, 'Write delta.text')}")

        def __add__(self, other: object) -> NoReturn:
            raise TypeError("a delta is no text. Write delta.text")

        __radd__ = __add__

    @property
    def content(self) -> str:
        """The delta's part of the answer itself, without reasoning and calls of tools."""
        if self.events is None:
            return self.text
        return "".join(event.text for event in self.events if isinstance(event, ContentDelta | ToolCallDropped))

    @property
    def reasoning(self) -> str:
        """The delta's part of the reasoning before the answer."""
        return "".join(event.text for event in self.events or () if isinstance(event, ReasoningDelta))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that are complete with it."""
        return fold(self.events or ()).tool_calls


@dataclasses.dataclass(frozen=True, slots=True)
class Usage(Record):
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0  # of the completion, without the tags around them

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    if not TYPE_CHECKING:

        def __getitem__(self, name: object) -> NoReturn:
            attribute = name if isinstance(name, str) else "total_tokens"
            raise TypeError(f"a usage has no items. Write done.usage.{attribute}")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Timings(Record):
    """Seconds, by time.perf_counter(). `compiling` and `compiling_later` are parts of the others."""

    queued: float  # submit to first admission
    first_token: float  # submit to first token
    total: float  # submit to end
    compiling: float = 0.0  # of total, while steps waited for a program to be compiled or loaded
    compiling_later: float = 0.0  # of that, after the first token
    reasoning: float = 0.0  # of total, from the first text of reasoning to the last

    _seconds = ("queued", "first_token", "total", "compiling", "compiling_later", "reasoning")

    def decode_rate(self, tokens: int) -> float:
        """Return the tokens per second after the first one, without the time for compiling programs."""
        seconds = self.total - self.first_token - self.compiling_later
        return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Completion(Drawable, ForeignNames):
    """A finished sequence, the result of `await session.generate(prompt)`."""

    _foreign: ClassVar[Mapping[str, str]] = COMPLETION

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    usage: Usage
    timings: Timings
    sampling: Sampling
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    stop_reason: str | int | None = None  # with finish_reason "stop": the stop string or the stop token's id
    reply: Reply | None = None  # in a chat that reads the reply for reasoning or calls: its parts
    # Texts of tokens are decoded on access. Copies and pickles don't have this function.
    decode: Callable[[Sequence[int]], str] | None = dataclasses.field(default=None, repr=False, compare=False)
    forced: tuple[bool, ...] = ()  # for each token of a structured text: True if its grammar left no choice
    covered: int = 0  # tokens at the prompt's end that belong to the structured text, in a fork
    weights_versions: tuple[int, ...] = ()  # of each token: how often weights had been swapped when it was chosen
    # Builds the object.
    parsing: DeferredParse | None = dataclasses.field(default=None, repr=False, compare=False)
    captured: Captured | None = None  # the arrays that `capture` names
    images: tuple[PictureLike, ...] = dataclasses.field(
        default=(), repr=False, compare=False
    )  # the prompt's, as they were read
    image_runs: tuple[tuple[int, int], ...] = dataclasses.field(
        default=(), repr=False, compare=False
    )  # their positions in the prompt, tile by tile
    question: str = dataclasses.field(default="", repr=False, compare=False)  # the text that came with pictures
    embedded: EmbeddedPrompt | None = dataclasses.field(default=None, repr=False, compare=False)  # a soft prompt
    left_out: LeftOut | None = None  # turns of a chat that the prompt leaves out, for want of room
    # How a chat's reply is read, for its forks. Copies and pickles don't know it.
    _read_by: Extensions = dataclasses.field(default=NONE, repr=False, compare=False)

    if not TYPE_CHECKING:

        def __getitem__(self, name: object) -> NoReturn:
            raise TypeError(f"a completion has no items. {of_item(COMPLETION, name, 'Write done.text')}")

        def __add__(self, other: object) -> NoReturn:
            raise TypeError("a completion is no text. Write done.text")

        __radd__ = __add__

        def __len__(self) -> NoReturn:
            raise TypeError("a completion has no len(). Write len(done.text), or len(done.token_ids)")

        def __bool__(self) -> bool:
            return True  # Python asks __len__ otherwise

    @property
    def parsed(self) -> Any:
        """The object that the text describes, of the type that was passed as `schema`; None without a structure.

        Also None if the text was cut or does not validate: `parse_error` says why. Its static type is Any, since most
        structures are not types, and options are the same for all calls: `person: Person = done.parsed` gives it one.
        """
        return None if self.parsing is None else self.parsing.get().value

    @property
    def closed(self) -> bool:
        """True if the structure was ended because tokens ran out: `parsed` is whole, but its last values may be cut."""
        return self.finish_reason.cut and self.parsing is not None and self.parse_error is None

    @property
    def parse_error(self) -> NotParsed | None:
        """The reason why `parsed` is None in spite of a structure, else None. Its `reason` is one word."""
        return None if self.parsing is None else self.parsing.get().problem

    @property
    def seed(self) -> int | None:
        """The seed that repeats the draw; None if the request stopped before one was drawn."""
        return self.sampling.seed

    @property
    def content(self) -> str:
        """The answer itself: the text without reasoning and calls of tools."""
        return self.text if self.reply is None else self.reply.content

    @property
    def reasoning(self) -> str:
        """The text of a reasoning model before its answer; empty if there is none."""
        return "" if self.reply is None else self.reply.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that the model asks to call, if `chat` has `tools`."""
        return () if self.reply is None else self.reply.tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, for the next turn of a chat."""
        message = ReplyMessage(role="assistant", content=self.content)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message

    @property
    def repetition(self) -> Repetition | None:
        """How its end repeats itself, the same block of tokens several times; None if it does not.

        Greedy answers of small models do: draw them (temperature=0.8), or pass repetition_penalty=1.1.
        """
        return repetition(self.token_ids)

    @property
    def patches(self) -> dict[int, PicturePatch]:
        """The tokens of the prompt that are pictures: the picture, row and column of each, by its position.

        `done.captured.select(positions=list(done.patches))` returns their captures.
        """
        return patches_of(picture_runs(self.image_runs, [image.grids for image in self.images]))

    @property
    def prompt_texts(self) -> tuple[str, ...]:
        """Each prompt token's text; tokens of pictures are shown as `▦` with row and column."""
        patches = self.patches
        return tuple(
            self.text_of(token) if (patch := patches.get(position)) is None else f"▦{patch.row},{patch.column}"
            for position, token in enumerate(self.prompt_token_ids)
        )

    @property
    def token_texts(self) -> tuple[str, ...]:
        """Each token's text by itself; half a character shows as �."""
        return tuple(map(self.text_of, self.token_ids))

    def text_of(self, token_id: int) -> str:
        """Return one token's text; special tokens are shown by their names."""
        return f"[{token_id}]" if self.decode is None else self.decode([token_id])

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        summary = ", ".join(filter(None, (summary_of(self), problem_of(self))))
        return f"<Completion {self.id}: {words.shorten(self.text)!r}, {summary}>"

    def reply_reading(self) -> Extensions:
        """Return how a chat's reply is read, for a fork of it; empty after a pickle."""
        return self._read_by

    def __getstate__(self) -> list[Any]:
        # Without the tokenizer and the reader of replies: a pickled completion is text and numbers.
        left_out = {"decode": None, "_read_by": NONE}
        return [left_out.get(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]


def summary_of(done: Completion) -> str:
    """Say how long a completion is and how it ended: `12 tokens, ended by the model`."""
    calls = f"{words.count(len(done.tool_calls), 'tool call')}, " if done.tool_calls else ""
    repeats = "" if (found := done.repetition) is None else f", {found}"
    left_out = "" if done.left_out is None else f", {done.left_out.words}"
    return f"{calls}{words.count(len(done.token_ids), 'token')}, {describe_end(done.finish_reason)}{repeats}{left_out}"


def problem_of(done: Completion) -> str:
    """Describe the problem of a completion in words; empty if there is none."""
    if done.parse_error is not None:
        return f"no object: {words.shorten(str(done.parse_error), 100)}"
    if done.closed:
        return "its structure was closed in time"
    silent = done.finish_reason is FinishReason.EOS and not done.text and done.reply is None
    return _SILENT if silent else ""


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The pooled hidden states of a prompt."""

    vector: Vector
    usage: Usage
    timings: Timings
