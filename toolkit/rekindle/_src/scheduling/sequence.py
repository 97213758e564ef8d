"""One live request as the scheduler sees it: its bounds, its state, and the explanation of that state.

`Sequence` has its tokens, its pages, and how far it has been computed.

Two counts are positions, the first at most the second: `computed` were committed, `planned` will be in the pages once
every step in flight has run. Two are tokens: `generated` have values that the host knows, `sampled` adds those that
steps in flight will bring. A decode step is planned while the token that it reads is still on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from rekindle._src.core import words
from rekindle._src.core.activity import NO_WAIT, ProgramWait
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.extension import PromptNote
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import FinishReason, IntArray, PageRun, Request, Row, SlotPair, Status
from rekindle._src.kvcache import PrefixCache
from rekindle._src.kvcache.digest import page_keys
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.kvcache.side import EntryWords
from rekindle._src.scheduling.drafting.proposal import RequestDrafts
from rekindle._src.scheduling.followers import ForcedTokens, followers_of
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

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        max_prefill_rows: int,
        padded: bool = True,
        edge: int = 1,
        whole: bool = False,
    ) -> Limits:
        """Return the limits of a resolved config; `padded` if a step costs its program's size, however few its rows.

        Prompts are cut at multiples of `edge` if a step has room for that in addition to all decode rows.
        """
        assert config.max_model_len is not None, "the config is not resolved"
        assert config.page_size is not None, "the config is not resolved"
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


_GROWTH = 64  # tokens or pages that a buffer grows by, at least


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
    """Mutable state of one request; the scheduler is its only owner."""

    __slots__ = (
        "_keys", "_pages", "_table", "_tokens", "arrived", "cached", "cached_tokens", "claimed", "computed", "cutting",
        "drafter", "drafting", "ended_at", "epoch", "followers", "forced", "fresh", "generated", "generates",
        "generation", "holding", "in_flight", "known", "limit", "limit_reason", "namespace", "naming", "need", "node",
        "num_pages", "overtaken", "page_size", "planned", "preemptions", "published", "queued_at", "reason", "request",
        "sampled", "sides", "slot", "status", "target", "timeline", "undrafted", "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        arrived: int,
        limit: int,
        limit_reason: FinishReason,
        page_size: int,
        cache: PrefixCache | None = None,
    ) -> None:
        self.request = request
        self.generates = request.generates
        self.holding = request.extensions.holding  # may keep it out of steps
        self.cutting = request.extensions.cutting  # decide where its prompt is cut
        self.naming = request.extensions.naming  # names its tokens for the prefix tree
        self.namespace = request.namespace  # the requests that it shares pages with
        self.arrived = arrived  # order of submission
        self.limit = limit  # tokens it may generate, known before the first one is
        self.limit_reason = limit_reason
        self.page_size = page_size
        self.status = Status.QUEUED
        self.reason = "has not had its turn"  # why it waits, for explain()
        self.timeline = Timeline(request.arrival)
        self.ended_at: float | None = None  # by time.perf_counter()
        self.waits_for: Sequence | None = None  # the one that computes the prefix which this one needs
        self.overtaken = 0  # requests admitted before it while it was the oldest
        self.preemptions = 0
        self.queued_at: int | None = None  # tokens admitted before it was queued; kept under the policy sjf
        # State of this epoch, which begins with an admission:
        self.epoch = 0
        self.slot = -1
        self.fresh = True  # no row was planned in this epoch
        self.in_flight = 0  # steps that contain it and were neither committed nor failed
        self.target = 0  # positions to prefill: the prompt, and tokens generated before a preemption
        self.planned = 0
        self.computed = 0
        self.cached = 0  # leading positions with cached pages when the epoch began
        # Tokens:
        self._tokens = request.begun
        self.known = len(self._tokens)  # tokens with values on the host
        self.generated = self.known - request.prompt_length  # known tokens that are not the prompt's
        self.sampled = self.generated  # generated, plus tokens that steps in flight will add
        self.cached_tokens = 0  # prompt tokens that the first admission found in the cache
        self.followers = followers_of(request, cache)
        self.forced = next((one for one in self.followers if isinstance(one, ForcedTokens)), None)
        self.undrafted = True  # no drafter has begun with it
        self.drafting: dict[str, RequestDrafts] = {}  # what drafters keep of it, by their names
        self.drafter = ""  # the one that proposed the drafts in flight
        self.need: object = None  # what its decode rows need of programs, once it is known; see ready_rows
        self._keys: list[int] = []
        # Pages:
        self.num_pages = 0
        self._pages: IntArray = np.empty(0, np.int32)
        self._table: IntArray | None = None
        self.node: Node | None = None  # the deepest node of the prefix tree that the sequence holds
        self.generation = 0  # of the prefix cache that `node` belongs to
        self.published = 0  # leading pages that are in the tree
        self.claimed = 0  # leading pages that are claimed in PrefixClaims
        self.sides: tuple[Any, ...] = ()  # a `Holding` of each side cache, since the latest admission

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def held(self) -> bool:
        """True while no step may have it, because too many of its captures wait for their disk."""
        return bool(self.holding) and any(extension.held for extension in self.holding)

    @property
    def prefilling(self) -> bool:
        return self.planned < self.target

    @property
    def decodes(self) -> bool:
        """True if one token is left to prefill, which a decode row computes. False for one that generates nothing."""
        return self.planned + 1 == self.target and self.generates

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def reusable(self) -> int:
        """Leading tokens with pages that may come from the cache."""
        return min((one.reusable(self.known) for one in self.followers), default=self.known)

    @property
    def remaining(self) -> int:
        """Tokens that the sequence may still sample."""
        return self.limit - self.sampled

    @property
    def has_hidden(self) -> bool:
        """True if the device has the hidden state before its latest token, which is known: it was computed in this
        epoch."""
        return self.known - 1 > self.cached

    @property
    def outputs(self) -> IntArray:
        """The generated tokens that the host knows."""
        return self._tokens[self.request.prompt_length : self.known]

    @property
    def pages(self) -> IntArray:
        return self._pages[: self.num_pages]

    def tokens(self, start: int, stop: int) -> IntArray:
        """Return the values of the tokens [start, stop); all of them must be known."""
        assert stop <= self.known, f"{self.id}: token {stop - 1} is not known yet, {self.known} are"
        return self._tokens[start:stop]

    def names(self, start: int, stop: int) -> IntArray:
        """Return the names of the tokens [start, stop) in the prefix tree; `start` begins a page."""
        tokens = self.tokens(start, stop)
        return tokens if self.naming is None else self.naming.names(tokens, start, self.page_size)

    def prefix(self) -> Prefix:
        """Return all known tokens as the prefix tree knows them."""
        return Prefix(self.names(0, self.known), self.namespace)

    def text(self) -> IntArray:
        """Return all known tokens, with numbers below 0 for tokens without text, such as a picture's."""
        tokens = self.tokens(0, self.known)
        return tokens if self.naming is None else self.naming.masked(tokens, 0)

    def keys(self, count: int) -> list[int]:
        """Return the lookup keys of the first `count` pages; each is computed once."""
        keys = self._keys
        if len(keys) < count:
            first, size = len(keys), self.page_size
            keys += page_keys(
                self.names(first * size, count * size),
                size,
                first=first,
                previous=keys[-1] if keys else self.namespace.key,
            )
        return keys if len(keys) == count else keys[:count]

    def append(self, token: int) -> None:
        if self.known == len(self._tokens):
            # Rows of steps in flight may still read the old buffer, so it is left as it is.
            self._tokens = _grown(self._tokens, self.known + 1)
        self._tokens[self.known] = token
        self.known += 1
        self.generated += 1
        if self.drafting:
            for drafts in self.drafting.values():
                drafts.push(token)

    def add_pages(self, pages: list[int]) -> None:
        end = self.num_pages + len(pages)
        if end > len(self._pages):
            self._pages = _grown(self._pages[: self.num_pages], end)
        self._pages[self.num_pages : end] = pages
        self.num_pages = end
        self._table = None

    def replace_pages(self, first: int, pages: list[int]) -> None:
        """Replace pages by others of the same content; tables of steps in flight are copies and do not change."""
        self._pages[first : first + len(pages)] = pages
        self._table = None

    def enter(self, kind: PhaseKind, reason: str = "") -> None:
        """Begin a phase of the sequence's timeline, or give the present one another reason."""
        if reason:
            self.reason = reason
        self.timeline.enter(kind, reason, computed=self.computed, generated=self.generated)

    def begin(self, slot: int, start: int) -> None:
        """Begin an epoch in `slot`; the pages hold the positions [0, start) already."""
        assert not self.in_flight, f"{self.id} is admitted with steps in flight"
        assert self.sampled == self.generated, f"{self.id} is admitted with tokens in flight"
        self.epoch += 1
        self.slot = slot
        self.fresh = True
        self.computed = self.planned = self.cached = start
        self.target = self.known
        self.status = Status.PREFILL
        self.enter(PhaseKind.PREFILL)
        for follower in self.followers:
            follower.begin(start)
        if self.epoch == 1:
            self.cached_tokens = min(start, self.request.prompt_length)

    def leave(self) -> None:
        """Forget slot and pages, which were returned."""
        self.slot = -1
        self.num_pages = self.published = self.claimed = 0
        self._table = None
        self.node = None
        self.sampled = self.generated

    def row(self, length: int, sides: tuple[SlotPair | PageRun, ...] = ()) -> Row:
        """Make the sequence's row of `length` tokens in the next step, and count that step as in flight.

        It uses `sides` of the side caches.
        """
        start = self.planned
        end = start + length
        assert end <= self.num_pages * self.page_size, f"{self.id}: no page for position {end - 1}"
        samples = end >= self.target and self.generates
        if self._table is None:
            self._table = self._pages[: self.num_pages].copy()
        row = Row(
            self.request,
            self.epoch,
            self.slot,
            start,
            length,
            self._table,
            # A token that the host knows may be one that a draft sampled, which the slot has not seen.
            self.tokens(start, end) if end <= self.known else None,
            samples,
            self.fresh,
            self.sampled,
            self.outputs if self.fresh and self.generated else None,
            start < self.published * self.page_size,
            sides=sides,
        )
        self.fresh = False
        self.planned = end
        self.sampled += samples
        self.in_flight += 1
        return row

    def drafts(self, proposed: Items[int], sides: Items[tuple[SlotPair | PageRun, ...]], drafter: str) -> list[Row]:
        """Make rows for the tokens that a drafter proposed, after the latest row; they add nothing to the counts until
        accepted.

        They use `sides` of the side caches, one after the other.
        """
        start, tokens = self.planned, np.array(proposed, np.int32)
        self.drafter = drafter
        assert start + len(tokens) <= self.num_pages * self.page_size, f"{self.id}: no page for its last draft"
        if self._table is None:
            self._table = self._pages[: self.num_pages].copy()
        self.in_flight += len(tokens)
        return [
            Row(
                self.request,
                self.epoch,
                self.slot,
                start + index,
                1,
                self._table,
                tokens[index : index + 1],
                True,
                generated=self.sampled + index,
                draft=True,
                sides=sides[index],
            )
            for index in range(len(tokens))
        ]

    @property
    def awaited(self) -> bool:
        """True if a drafter needs its next token before the step after that is planned."""
        return bool(self.drafting) and any(drafts.asks for drafts in self.drafting.values())

    def drafts_checked(self) -> None:
        """Continue after the last accepted token, now that the drafts were checked."""
        self.planned, self.sampled = self.computed, self.generated

    def growth(self, fraction: float) -> int:
        """Return how many more pages the sequence will need if it samples `fraction` of its remaining tokens."""
        length = self.request.prompt_length + self.sampled + int(fraction * self.remaining)
        return max(0, pages_for(length, self.page_size) - max(self.num_pages, pages_for(self.known, self.page_size)))


def _grown(array: IntArray, size: int) -> IntArray:
    grown = np.empty(size + max(_GROWTH, size // 4), np.int32)
    grown[: len(array)] = array
    return grown


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
    request, status = sequence.request, sequence.status
    words = [_WORDS[status]]
    if status in (Status.QUEUED, Status.PREEMPTED):
        words.append(f"it {reason}; {ahead} older requests wait")
        if sequence.timeline.kind is PhaseKind.QUEUED:
            sequence.timeline.enter(PhaseKind.QUEUED, reason)
    elif status in (Status.PREFILL, Status.DECODE) and sequence.timeline.kind is PhaseKind.COMPILING:
        words.append(f"it {sequence.reason}")
    elif status is Status.PREFILL:
        words.append(f"{sequence.computed} of {sequence.target} positions are in the cache")
    elif sequence.reason and sequence.ended and sequence.reason != status.value:
        words.append(sequence.reason if " " in sequence.reason else f"ended by {sequence.reason}")
    notes = request.extensions.notes(sequence.cached_tokens)
    if not request.generates:
        words.append("it is embedded, so that all of its tokens are computed")
    elif sequence.epoch:
        hit = sequence.cached_tokens
        words.append(
            f"{hit} of {request.prompt_length} prompt tokens came from the cache"
            if hit
            else f"none of its {request.prompt_length} prompt tokens were cached"
        )
        words += [line for holding in sequence.sides for line in holding.describe()]
    if sequence.epoch:
        words += [note.words for note in notes]
    if sequence.generated:
        words.append(f"it has generated {sequence.generated} of at most {sequence.limit} tokens")
    if (forced := sequence.forced) is not None and sequence.generated:
        words.append(f"its grammar left no choice for {forced.count} of them")
    words += [drafts.describe() for drafts in sequence.drafting.values() if drafts.drafted]
    if sequence.preemptions:
        words.append(f"it was preempted {sequence.preemptions} times because pages ran out")
    return Explanation(
        id=request.id,
        status=status,
        text="; ".join(words),
        prompt_tokens=request.prompt_length,
        cached_tokens=sequence.cached_tokens,
        computed_tokens=sequence.computed,
        generated_tokens=sequence.generated,
        max_generated=sequence.limit,
        pages=sequence.num_pages,
        preemptions=sequence.preemptions,
        ahead=ahead,
        waits_for=sequence.waits_for.id if sequence.waits_for is not None else None,
        timeline=sequence.timeline.phases(
            end,
            program_wait.since(sequence.timeline.began),
            computed=sequence.computed,
            generated=sequence.generated,
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
