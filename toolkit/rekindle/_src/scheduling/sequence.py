"""One live request as the scheduler sees it: its bounds, its state, and the explanation of that state.

`Sequence` has the parts of `state.py`: its place in the queue, its epoch, its tokens, its pages and its drafts.
Two counts of an epoch are positions, the first at most the second: `computed` were committed, `planned` will be in the
pages once every step in flight has run. Two are tokens: `generated` have values that the host knows, `sampled` adds
those that steps in flight will bring. A decode step is planned while the token that it reads is still on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from rekindle._src.core import words
from rekindle._src.core.activity import NO_WAIT, ProgramWait
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.extension import PromptNote
from rekindle._src.core.records import FinishReason, PageRun, Request, Row, SlotPair, Status
from rekindle._src.kvcache import PrefixCache
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.kvcache.side import EntryWords
from rekindle._src.scheduling.followers import SequenceExtensions
from rekindle._src.scheduling.state import Drafting, Epoch, PageList, QueuePlace, SequenceTokens, TreePlace
from rekindle._src.scheduling.timeline import Phase, PhaseKind, Timeline, summary
from rekindle.errors import OutOfPages, PromptTooLong


def how_to_fit(max_model_len: int, longest: int | None) -> str:
    """Return the remedy for a prompt that is too long; `longest` is how many positions the model has."""
    if longest is not None and max_model_len >= longest:
        return f"Shorten it: the model itself has {longest:,} positions"
    return "Shorten it, or raise max_model_len in open()" + (f", up to {longest:,}" if longest is not None else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that are fixed while a session lives."""

    max_requests: int  # slots
    max_tokens_per_step: int  # shared by decode rows and prefill chunks
    max_model_len: int
    page_size: int
    max_prefill_rows: int = 1 << 30  # sequences that prefill in one step
    max_queue: int = 1024
    max_beside_decode: int = 1 << 30  # prompt tokens of a step that has decode rows, which wait for them
    longest: int | None = None  # positions of the model; None: not known
    edge: int = 1  # prompts are cut at multiples of it
    whole: bool = False  # prompts are not cut: tokens see later ones
    apart: bool = False  # tokens that are decoded have other keys and values than the same tokens in a prompt
    repeated_steps: int = 1  # decode steps that one dispatch may have
    repeated_rows: int = 1 << 30  # rows of each of these, at most
    repeated_seconds: float = 0.008  # that these may take together: another request waits for them

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        *,
        max_prefill_rows: int,
        padded: bool = True,
        edge: int = 1,
        whole: bool = False,
    ) -> Limits:
        """Return the limits of a resolved config; `padded` if a step costs its program's size, however few its rows.

        Prompts are cut at multiples of `edge` if a step has room for that in addition to all decode rows.
        """
        beside = config.max_tokens_per_step if padded else -(-config.max_tokens_per_step // 2)
        fits = edge <= min(beside, config.max_tokens_per_step - config.max_requests)
        return cls(
            max_requests=config.max_requests,
            max_tokens_per_step=config.max_tokens_per_step,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            max_prefill_rows=max_prefill_rows,
            max_beside_decode=beside,
            max_queue=config.max_queue,
            edge=edge if fits else 1,
            whole=whole,
            apart=config.attention_budget is not None,
        )

    def room(self, request: Request, usable_pages: int) -> tuple[int, FinishReason]:
        """Return how many tokens `request` may sample alone on `usable_pages`, and its finish reason at that bound.

        It is at least 1: a request for no tokens samples one, which is left out of its result.

        Raises `PromptTooLong` or `OutOfPages` if not even one fits; an embedding generates none. The last
        token is sampled but its keys are never computed, so a sequence may be one token longer than its pages.
        """
        length, max_tokens = request.prompt_length, request.sampling.max_tokens
        if not request.generates and length > self.max_model_len:
            raise PromptTooLong(
                "prompt",
                f"{length} tokens",
                f"is longer than max_model_len, which is {self.max_model_len}",
                how_to_fit(self.max_model_len, self.longest),
            )
        if request.generates and length >= self.max_model_len + (max_tokens == 0):
            raise PromptTooLong(
                "prompt",
                f"{length} tokens",
                f"leaves no room for a new token, max_model_len is {self.max_model_len}",
                how_to_fit(self.max_model_len, self.longest),
            )
        if pages_for(length, self.page_size) > usable_pages:
            raise OutOfPages(
                f"The prompt's {length} tokens need {pages_for(length, self.page_size)} KV pages of {self.page_size}, "
                f"{usable_pages} can be used. Raise device_memory or device_pages, or unpin prefixes."
            )
        if not request.generates:
            return 0, FinishReason.LENGTH
        room = min(self.max_model_len, usable_pages * self.page_size + 1) - length
        if max_tokens <= room:
            return max(1, max_tokens), FinishReason.LENGTH
        return room, FinishReason.CONTEXT


class Holding:
    """The part of a running sequence in one side cache. Each `SideRule` has its own kind."""

    __slots__ = ("again", "source", "words")

    def __init__(self, words: EntryWords) -> None:
        self.words = words
        self.source = ""  # where the entries came from that it continued
        self.again = 0  # cached tokens that it computes again, since no entry was there

    def describe(self) -> list[str]:
        """Describe the entry that the sequence continued, and the pages computed again for lack of a later one."""
        lines = [f"{self.words.needed} was {self.source}"] if self.source else []
        if self.again > 0:
            lines.append(f"pages of {self.again} more were there, but {self.words.missing}: they were computed again")
        return lines


class Sequence:
    """A live request and its state, in parts; the scheduler is its only owner."""

    __slots__ = (
        "apart", "cached_tokens", "drafting", "ended_at", "epoch", "extensions", "generates", "limit", "limit_reason",
        "namespace", "need", "pages", "queue", "reason", "request", "sides", "status", "timeline", "tokens", "tree",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        arrived: int,
        limit: int,
        limit_reason: FinishReason,
        page_size: int,
        cache: PrefixCache | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.request, self.apart = request, apart
        self.generates = request.generates
        self.extensions = SequenceExtensions(request, cache)
        self.namespace = request.namespace  # the requests that it shares pages with
        self.limit = limit  # tokens it may generate, known before the first one is
        self.limit_reason = limit_reason
        self.status = Status.QUEUED
        self.reason = "has not had its turn"  # why it waits, for explain()
        self.timeline = Timeline(request.arrival)
        self.ended_at: float | None = None  # by time.perf_counter()
        self.queue: QueuePlace[Sequence] = QueuePlace(arrived)
        self.epoch = Epoch()
        self.tokens = SequenceTokens(request, page_size)
        self.pages = PageList(page_size)
        self.tree = TreePlace()
        self.sides: tuple[Any, ...] = ()  # a `Holding` of each side cache, since the latest admission
        self.drafting = Drafting()
        self.cached_tokens = 0  # prompt tokens that the first admission found in the cache
        self.need: object = None  # what its decode rows need of programs, once it is known; see ready_rows

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def held(self) -> bool:
        """True while no step may have it."""
        return self.extensions.held

    @property
    def prefill_end(self) -> int:
        """The position where its prefill rows end: a token that was decoded is decoded again, if that makes a
        difference."""
        return min(self.epoch.target, self.request.prompt_length) if self.apart else self.epoch.target

    @property
    def prefilling(self) -> bool:
        return self.epoch.planned < self.prefill_end

    @property
    def decodes(self) -> bool:
        """True if a decode row computes its next token, which is known.

        That is the last one that is left to prefill, but not if it is a prompt's and has a row of numbers; or, if
        decode rows compute tokens in another way, each token after the prompt. False for a sequence that generates
        nothing.
        """
        epoch, end = self.epoch, self.request.prompt_length
        if epoch.planned >= epoch.target or not self.generates:
            return False
        if self.apart:
            return epoch.planned >= end
        return epoch.planned + 1 == epoch.target and not (self.extensions.ends_in_row and epoch.target == end)

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def steady(self) -> bool:
        """True if its tokens are read by nothing on the host that decides how, or whether, its text goes on."""
        return self.extensions.steady and not self.request.sampling.stop

    @property
    def reusable(self) -> int:
        """Leading tokens with pages that may come from the cache."""
        known = self.tokens.known
        return self.extensions.reusable(min(known, self.request.prompt_length) if self.apart else known)

    @property
    def shareable(self) -> int:
        """Leading computed tokens with pages that other sequences may use."""
        computed = self.epoch.computed
        return min(computed, self.request.prompt_length) if self.apart else computed

    @property
    def remaining(self) -> int:
        """Tokens that the sequence may still sample."""
        return self.limit - self.tokens.sampled

    @property
    def has_hidden(self) -> bool:
        """True if the device has the hidden state before its latest token, which is known: it was computed in this
        epoch."""
        return self.epoch.planned >= self.tokens.known - 1 > self.epoch.cached

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens.append(token)
        if self.drafting.by_name:
            self.drafting.push(token)

    def enter(self, kind: PhaseKind, reason: str = "") -> None:
        """Begin a phase of the sequence's timeline, or give the present one another reason."""
        if reason:
            self.reason = reason
        self.timeline.enter(kind, reason, computed=self.epoch.computed, generated=self.tokens.generated)

    def begin(self, slot: int, start: int) -> None:
        """Begin an epoch in `slot`; the pages hold the positions [0, start) already."""
        assert not self.epoch.in_flight, f"{self.id} is admitted with steps in flight"
        assert self.tokens.sampled == self.tokens.generated, f"{self.id} is admitted with tokens in flight"
        self.epoch = Epoch(self.epoch.number + 1, slot, start, self.tokens.known)
        self.status = Status.PREFILL
        self.enter(PhaseKind.PREFILL)
        self.extensions.begin(start)
        if self.epoch.number == 1:
            self.cached_tokens = min(start, self.request.prompt_length)

    def leave(self) -> None:
        """Forget slot and pages, which were returned."""
        self.epoch.slot = -1
        self.pages.clear()
        self.tree.leave()
        self.tokens.sampled = self.tokens.generated

    def row(self, length: int, sides: tuple[SlotPair | PageRun, ...] = ()) -> Row:
        """Make the sequence's row of `length` tokens in the next step, and count that step as in flight.

        It uses `sides` of the side caches.
        """
        epoch, tokens, pages = self.epoch, self.tokens, self.pages
        start, fresh = epoch.planned, epoch.fresh
        end = start + length
        assert end <= pages.count * pages.size, f"{self.id}: no page for position {end - 1}"
        samples = end >= epoch.target and self.generates
        row = Row(
            self.request,
            epoch.number,
            epoch.slot,
            start,
            length,
            pages.table(),
            # A token that the host knows may be one that a draft sampled, which the slot has not seen.
            tokens.values(start, end) if end <= tokens.known else None,
            samples,
            fresh,
            tokens.sampled,
            tokens.outputs if fresh and tokens.generated else None,
            start < self.tree.published * pages.size,
            sides=sides,
        )
        epoch.fresh = False
        epoch.planned = end
        epoch.in_flight += 1
        tokens.sampled += samples
        return row

    def draft_rows(self, proposed: Items[int], sides: Items[tuple[SlotPair | PageRun, ...]], drafter: str) -> list[Row]:
        """Make rows for the tokens that a drafter proposed, after the latest row; they add nothing to the counts until
        accepted.

        They use `sides` of the side caches, one after the other.
        """
        epoch, pages = self.epoch, self.pages
        start, tokens, sampled = epoch.planned, np.array(proposed, np.int32), self.tokens.sampled
        self.drafting.proposer = drafter
        assert start + len(tokens) <= pages.count * pages.size, f"{self.id}: no page for its last draft"
        table = pages.table()
        epoch.in_flight += len(tokens)
        return [
            Row(
                self.request,
                epoch.number,
                epoch.slot,
                start + index,
                1,
                table,
                tokens[index : index + 1],
                True,
                generated=sampled + index,
                draft=True,
                sides=sides[index],
            )
            for index in range(len(tokens))
        ]

    def drafts_checked(self) -> None:
        """Continue after the last accepted token, now that the drafts were checked."""
        self.epoch.planned, self.tokens.sampled = self.epoch.computed, self.tokens.generated

    def growth(self, fraction: float) -> int:
        """Return how many more pages the sequence will need if it samples `fraction` of its remaining tokens."""
        tokens, pages = self.tokens, self.pages
        length = self.request.prompt_length + tokens.sampled + int(fraction * self.remaining)
        return max(0, pages_for(length, pages.size) - max(pages.count, pages_for(tokens.known, pages.size)))


_ENDED = frozenset({Status.FINISHED, Status.FAILED, Status.ABORTED})


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation(Drawable):
    """The state of a request and the reason for it, in words and numbers."""

    id: str
    status: Status
    text: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_generated: int
    pages: int
    preemptions: int
    ahead: int  # older requests in the queue
    waits_for: str | None  # the request that computes its prefix
    timeline: tuple[Phase, ...] = ()  # its life so far: what took how long, and why
    notes: tuple[PromptNote, ...] = ()  # on tokens of the prompt that are no text

    @property
    def seconds(self) -> float:
        """The seconds from its submission to its end, or until now."""
        return self.timeline[-1].start + self.timeline[-1].seconds if self.timeline else 0.0

    def __str__(self) -> str:
        return "\n".join([f"{self.id}: {self.text}", *(f"  {phase}" for phase in self.timeline)])

    def __repr__(self) -> str:
        times = f" ({summary(self.timeline)})" if self.timeline else ""
        return f"<Explanation of {words.shorten(f'{self.id}: {self.text}', 165 - min(120, len(times)))}{times[:160]}>"


def beginning(
    request_id: str, status: Status, text: str, prompt_tokens: int = 0, timeline: tuple[Phase, ...] = ()
) -> Explanation:
    """Explain a request that no scheduler knows: it was not taken in yet, or ended before that, or is over for long."""
    return Explanation(
        id=request_id,
        status=status,
        text=text,
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        computed_tokens=0,
        generated_tokens=0,
        max_generated=0,
        pages=0,
        preemptions=0,
        ahead=0,
        waits_for=None,
        timeline=timeline,
    )


def explanation(
    sequence: Sequence, ahead: int, reason: str, program_wait: ProgramWait = NO_WAIT, end: float | None = None
) -> Explanation:
    """Explain where a request is, and why it waits there if it does; `ahead` older requests wait.

    Its timeline goes on to `end`, by default until now, with the waits of its steps for programs.
    """
    request, status, owner = sequence.request, sequence.status, sequence.queue.waits_for
    words = [_WORDS[status]]
    if status in (Status.QUEUED, Status.PREEMPTED):
        words.append(f"it {reason}; {ahead} older requests wait")
        if sequence.timeline.kind is PhaseKind.QUEUED:
            sequence.timeline.enter(PhaseKind.QUEUED, reason)
    elif status in (Status.PREFILL, Status.DECODE) and sequence.timeline.kind is PhaseKind.COMPILING:
        words.append(f"it {sequence.reason}")
    elif status is Status.PREFILL:
        words.append(f"{sequence.epoch.computed} of {sequence.epoch.target} positions are in the cache")
    elif sequence.reason and sequence.ended and sequence.reason != status.value:
        words.append(sequence.reason if " " in sequence.reason else f"ended by {sequence.reason}")
    notes = request.extensions.notes(sequence.cached_tokens)
    if not request.generates:
        words.append("it is embedded, so that all of its tokens are computed")
    elif sequence.epoch.number:
        hit = sequence.cached_tokens
        words.append(
            f"{hit} of {request.prompt_length} prompt tokens came from the cache"
            if hit
            else f"none of its {request.prompt_length} prompt tokens were cached"
        )
        words += [line for holding in sequence.sides for line in holding.describe()]
    if sequence.epoch.number:
        words += [note.words for note in notes]
    if sequence.tokens.generated:
        words.append(f"it has generated {sequence.tokens.generated} of at most {sequence.limit} tokens")
        words += sequence.extensions.describe()
    words += [drafts.describe() for drafts in sequence.drafting.by_name.values() if drafts.drafted]
    if sequence.queue.preemptions:
        words.append(f"it was preempted {sequence.queue.preemptions} times because pages ran out")
    return Explanation(
        id=request.id,
        status=status,
        text="; ".join(words),
        prompt_tokens=request.prompt_length,
        cached_tokens=sequence.cached_tokens,
        computed_tokens=sequence.epoch.computed,
        generated_tokens=sequence.tokens.generated,
        max_generated=sequence.limit,
        pages=sequence.pages.count,
        preemptions=sequence.queue.preemptions,
        ahead=ahead,
        waits_for=None if owner is None else owner.id,
        timeline=sequence.timeline.phases(
            end,
            program_wait.since(sequence.timeline.began),
            computed=sequence.epoch.computed,
            generated=sequence.tokens.generated,
        ),
        notes=notes,
    )


_WORDS = {
    Status.QUEUED: "waits",
    Status.LOADING: "waits for cached pages to reach the device",
    Status.PREFILL: "computes its prompt",
    Status.DECODE: "generates",
    Status.PREEMPTED: "was preempted and waits to resume from the cache",
    Status.FINISHED: "has finished",
    Status.FAILED: "has failed",
    Status.ABORTED: "was aborted",
}
