"""Reports of the scheduler: a snapshot of its numbers, and the reason for the state of one request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items

from rekindle._src.core import html
from rekindle._src.core.records import Status
from rekindle._src.kvcache.caches import summed
from rekindle._src.kvcache.tree import CacheStatistics
from rekindle._src.scheduling.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SchedulerStatistics(html.Record):
    """Sizes now, and counts since the start."""

    waiting: int  # in the queue, parked and preempted ones included
    parked: int  # waiting for a prefix that another request computes; counted in `waiting`
    running: int
    leaving: int  # ended, but a step in flight still contains them
    steps_in_flight: int
    pages_total: int
    pages_free: int
    pages_held: int
    pages_cached: int  # kept by the prefix cache alone
    reserve_fraction: float  # share of the running requests' remaining tokens for which admission keeps pages back
    submitted: int
    finished: int
    aborted: int
    failed: int
    preemptions: int
    steps: int
    prompt_tokens: int  # of admitted requests
    cached_tokens: int  # prompt tokens that were found in the cache
    prefill_tokens: int  # computed in prefill rows; counted again after a preemption
    generated_tokens: int
    drafted_tokens: int  # proposed by prompt_lookup and computed
    accepted_tokens: int  # drafted tokens that the model sampled as well
    cache: CacheStatistics | None
    shards: tuple[SchedulerStatistics, ...] = ()  # of a mesh with several data shards: the figures of each

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that did not have to be computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
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

    def __str__(self) -> str:
        return f"{self.id}: {self.text}"

    def __repr__(self) -> str:
        return f"<Explanation of {self}>"

    def _repr_html_(self) -> str:
        prompt = {"from the cache": self.cached_tokens, "computed": self.prompt_tokens - self.cached_tokens}
        length = html.line(html.count(self.prompt_tokens, "prompt token"))
        return str(html.block(html.text(str(self)), length, html.bar(prompt)))


def explanation(sequence: Sequence, ahead: int, reason: str) -> Explanation:
    """Explain where a request is, and why it waits there if it does; `ahead` older requests wait."""
    request, status = sequence.request, sequence.status
    words = [_WORDS[status]]
    if status in (Status.QUEUED, Status.PREEMPTED):
        words.append(f"it {reason}; {ahead} older requests wait")
    elif status is Status.PREFILL:
        words.append(f"{sequence.computed} of {sequence.target} positions are in the cache")
    elif sequence.reason and sequence.ended:
        words.append(sequence.reason if " " in sequence.reason else f"ended by {sequence.reason}")
    if request.pooling is not None:
        words.append("it is embedded, so that all of its tokens are computed")
    elif sequence.epoch:
        hit = sequence.cached_tokens
        words.append(
            f"{hit} of {request.prompt_length} prompt tokens came from the cache"
            if hit
            else f"none of its {request.prompt_length} prompt tokens were cached"
        )
        words += _states(sequence)
    if sequence.generated:
        words.append(f"it has generated {sequence.generated} of at most {sequence.limit} tokens")
    if sequence.lookup is not None and sequence.lookup.drafted:
        words.append(f"{sequence.lookup.accepted} of {sequence.lookup.drafted} draft tokens were accepted")
    if (forced := sequence.forced) is not None and sequence.generated:
        words.append(f"its grammar left no choice for {forced.count} of them")
        if forced.drafted:
            words.append(f"{forced.accepted} of {forced.drafted} drafts of forced tokens were accepted")
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
    )


def _states(sequence: Sequence) -> list[str]:
    """Describe the state that a sequence continued, and what it computed again because that was not further on."""
    trail, tail, words = sequence.trail, sequence.tail, []
    if trail is not None and trail.source:
        words.append(f"the state behind them was {trail.source}")
    if trail is not None and trail.again > 0:
        words.append(f"pages of {trail.again} more were there, but no state behind them: they were computed again")
    if tail is not None and tail.source:
        words.append(f"the window before their end was {tail.source}")
    if tail is not None and tail.again > 0:
        words.append(f"pages of {tail.again} more were there, but no window before them: they were computed again")
    return words


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


def summed_figures(shards: Items[SchedulerStatistics], steps: int, in_flight: int) -> SchedulerStatistics:
    """Sum the figures of several data shards as those of one scheduler; a step is one of all shards together."""
    special = {"reserve_fraction", "steps", "steps_in_flight", "cache", "shards"}
    names = [field.name for field in dataclasses.fields(SchedulerStatistics) if field.name not in special]
    caches = [shard.cache for shard in shards if shard.cache is not None]
    return SchedulerStatistics(
        **{name: sum(getattr(shard, name) for shard in shards) for name in names},
        reserve_fraction=sum(shard.reserve_fraction for shard in shards) / len(shards),
        steps=steps,
        steps_in_flight=in_flight,
        cache=summed(caches) if caches else None,
        shards=tuple(shards),
    )
