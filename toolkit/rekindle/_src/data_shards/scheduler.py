"""The scheduler of a mesh with several data shards: one scheduler for each, and their plans in one step.

A request is placed on a shard when it is submitted, and runs there from its admission on: its pages and its slot are of
that shard's devices. While it waits it may still move: a shard with room takes requests that another one has no room
for, preempted ones included.

A step runs in all shards at once, in the same program: the smallest one that holds every shard's plan. So
requests are spread evenly, and the shard that knows a prompt gets it as long as that does not undo the spreading.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, TypeVar

from rekindle._src.core.activity import ProgramWait
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.prompt_hit import PromptHit
from rekindle._src.core.records import (
    NOBODY,
    FinishReason,
    PageMove,
    Request,
    Status,
    StepPlan,
    StepResult,
    TokenEvent,
    WaitingRequest,
)
from rekindle._src.kvcache.caches import PrefixCaches, summed
from rekindle._src.kvcache.pool import PagePool, pages_for
from rekindle._src.kvcache.tree import PrefixCache
from rekindle._src.scheduling.drafting.drafter import Drafter, summed_counts
from rekindle._src.scheduling.scheduler import Scheduler, SchedulerStatistics
from rekindle._src.scheduling.sequence import Explanation, Limits, Sequence
from rekindle.errors import InvalidRequest, OutOfPages, QueueFull

T = TypeVar("T")
# Prompt tokens that a shard has to have cached to get a request although it has one request more than the others.
WORTH_A_REQUEST = 256


class _ShardFlight(NamedTuple):
    plan: StepPlan
    parts: tuple[StepPlan | None, ...]  # of each shard; None: it had nothing to do


class ShardScheduler(Scheduler):
    """A scheduler of one shard. Its slots and pages are numbered after the earlier shards' own.

    A request that waits belongs to no device yet: it has neither slot nor pages, and its tokens, the keys of its pages
    and its seed are the same in every shard.
    """

    @property
    def live(self) -> int:
        """Requests between their submission and their end."""
        return len(self._alive)

    @property
    def waiting(self) -> int:
        """Requests that wait, for any reason."""
        return self._admission.waiting

    def has(self, request_id: str) -> bool:
        """True if a live request is in this shard."""
        return request_id in self._alive

    def has_pages(self, request: Request) -> bool:
        """True if a request, alone in the shard, would have pages for its prompt and all that it may generate."""
        length = request.prompt_length + max(1, request.sampling.max_tokens) - 1
        return pages_for(length, self.limits.page_size) <= self._ledger.usable(request)

    def remembered(self, keys: list[int]) -> int:
        """Return how many leading pages are known in any tier or being computed; approximate."""
        return self._admission.remembered(keys)

    @property
    def blocked_head(self) -> Sequence | None:
        """The next request to be admitted, if it has to wait until another one gives up its slot or pages."""
        sequence = self._admission.foremost
        return None if sequence is None or self._admission.has_room(sequence) else sequence

    def has_room(self, sequence: Sequence, moved_in: Items[Sequence]) -> bool:
        """True if a request of another shard would be admitted at once, along with the requests just `moved_in`."""
        return self.waiting == len(moved_in) and self._admission.has_room(sequence, moved_in)

    def give(self, sequence: Sequence) -> None:
        """Let a waiting request go to another shard."""
        self._admission.remove(sequence)
        del self._alive[sequence.id]

    def take(self, sequence: Sequence) -> None:
        """Queue a request that another shard gave."""
        self._alive[sequence.id] = sequence
        self._admission.take(sequence)


class DataScheduler:
    """The implementation of `SchedulerLike` over several shards; it has the methods of `Scheduler`."""

    def __init__(self, shards: Items[ShardScheduler]) -> None:
        self.shards = tuple(shards)
        caches = [shard.cache for shard in self.shards if shard.cache is not None]
        self.cache = PrefixCaches(caches) if caches else None
        self.limits = self.shards[0].limits
        self.moved = 0  # requests that went to another shard while they waited
        self._flights: deque[_ShardFlight] = deque()
        self._step = 0

    @classmethod
    def over(
        cls,
        limits: Limits,
        pools: Items[PagePool],
        caches: Items[PrefixCache | None],
        *,
        policy: str,
        seed: int | None,
        program_wait: ProgramWait,
        drafters: Items[Drafter],
    ) -> DataScheduler:
        """Return the scheduler over shards with these pools and caches, and `limits` for each shard."""
        arrivals = itertools.count()
        return cls(
            [
                ShardScheduler(
                    limits,
                    pool,
                    cache=cache,
                    policy=policy,
                    seed=seed,
                    first_slot=number * limits.max_requests,
                    arrivals=arrivals,
                    program_wait=program_wait,
                    drafters=drafters,
                )
                for number, (pool, cache) in enumerate(zip(pools, caches, strict=True))
            ]
        )

    @property
    def has_work(self) -> bool:
        return any(shard.has_work for shard in self.shards)

    @property
    def held(self) -> bool:
        return any(shard.held for shard in self.shards)

    def submit(self, request: Request) -> None:
        if any(shard.has(request.id) for shard in self.shards):
            raise InvalidRequest("id", request.id, "is the id of a request that is still alive", "Use a new id")
        waiting = sum(shard.waiting for shard in self.shards)
        if waiting >= self.limits.max_queue:
            raise QueueFull(f"{waiting} requests wait and max_queue is {self.limits.max_queue}. Submit it later.")
        refused: OutOfPages | None = None
        for index in self.places(request):
            try:
                self.shards[index].submit(request)
            except OutOfPages as error:  # other prefixes may be pinned elsewhere
                refused = refused or error
            else:
                return
        assert refused is not None, "there is a shard"
        raise refused

    def places(self, request: Request) -> list[int]:
        """Return the indices of the shards, the best one for a request first."""
        keys = list[int]()
        if self.cache is not None:
            prefix = request.prefix(self.limits.page_size).first(request.reusable)
            keys = self.cache.trees[0].keys(prefix)

        def cost(index: int) -> tuple[bool, int, int, int]:
            shard = self.shards[index]
            known = shard.remembered(keys) * self.limits.page_size
            return not shard.has_pages(request), shard.live * WORTH_A_REQUEST - known, shard.live, index

        return sorted(range(len(self.shards)), key=cost)

    def abort(self, request_id: str) -> TokenEvent | None:
        return self.finish(request_id, FinishReason.ABORTED)

    def finish(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        return self._first(lambda shard: shard.finish(request_id, reason))

    def failures(self) -> tuple[TokenEvent, ...]:
        return tuple(event for shard in self.shards for event in shard.failures())

    # -- one step

    def plan(self, *, now: bool = False) -> StepPlan | None:
        """Plan the next step; its rows wait for no program, since one runs in all shards."""
        if self._flights and self._flights[-1].plan.drafted:
            return None
        parts = [shard.plan() for shard in self.shards]
        for index, shard in enumerate(self.shards):
            if self._fill(shard) and parts[index] is None:
                parts[index] = shard.plan()
        planned = [part for part in parts if part is not None]
        if not planned:
            return None
        plan = StepPlan(
            self._step,
            tuple(row for part in planned for row in part.decode),
            tuple(row for part in planned for row in part.prefill),
            tuple(move for part in planned for move in part.offload),
            tuple(move for part in planned for move in part.restore),
            copies=tuple(copy for part in planned for copy in part.copies),
            awaited=NOBODY.union(*(part.awaited for part in planned)),
        )
        self._flights.append(_ShardFlight(plan, tuple(parts)))
        self._step += 1
        return plan

    def commit(self, result: StepResult) -> tuple[TokenEvent, ...]:
        flight = self._flights.popleft()
        assert flight.plan is result.plan, f"step {result.plan.step} committed before step {flight.plan.step}"
        decode, prefill = iter(result.rows[: len(flight.plan.decode)]), iter(result.rows[len(flight.plan.decode) :])
        events: list[TokenEvent] = []
        largest = max(part.tokens for part in flight.parts if part is not None)  # decides how long all of them take
        for shard, part in zip(self.shards, flight.parts, strict=True):
            if part is None:
                continue
            seconds = result.device_seconds * part.tokens / largest
            rows = (*(next(decode) for _ in part.decode), *(next(prefill) for _ in part.prefill))
            lost = tuple(lost for lost in result.lost if lost.move in part.restore)
            share = dataclasses.replace(result, plan=part, rows=rows, device_seconds=seconds, lost=lost)
            events += shard.commit(share)
        return tuple(events)

    def fail(self, plan: StepPlan, cause: BaseException) -> tuple[TokenEvent, ...]:
        flight = next(flight for flight in self._flights if flight.plan is plan)
        self._flights.remove(flight)
        events: list[TokenEvent] = []
        for shard, part in zip(self.shards, flight.parts, strict=True):
            if part is not None:
                events += shard.fail(part, cause)
        return tuple(events)

    # -- the caches, from outside

    def pin(self, prefix: Prefix) -> int:
        """Keep the cached pages of a prompt until `unpin`, in every shard; returns the most tokens that one covers.

        Raises `OutOfPages`, and pins nothing, if an accepted request could not finish while they are pinned.
        """
        covered = []
        for index, shard in enumerate(self.shards):
            try:
                covered.append(shard.pin(prefix))
            except OutOfPages:
                for pinned in self.shards[:index]:
                    pinned.unpin(prefix)
                raise
        return max(covered)

    def unpin(self, prefix: Prefix) -> int:
        return max(shard.unpin(prefix) for shard in self.shards)

    def forecast(self, request: Request) -> PromptHit:
        """Return where a request would find the beginning of its prompt, in the shard that it would be placed on."""
        return self.shards[self.places(request)[0]].forecast(request)

    @property
    def weights_version(self) -> int:
        """How often weights were swapped."""
        return self.shards[0].weights_version

    def flush_cache(self, root_key: bytes | None = None, *, recompute: bool = False, keep: bool = False) -> None:
        for shard in self.shards:
            shard.flush_cache(root_key, recompute=recompute, keep=keep)

    def vacate(self) -> tuple[PageMove, ...]:
        """Take the pages of all running requests and of the caches; see `Scheduler.vacate`."""
        return tuple(move for shard in self.shards for move in shard.vacate())

    def vacated(self) -> None:
        for shard in self.shards:
            shard.vacated()

    # -- statistics

    def status(self, request_id: str) -> Status | None:
        return self._first(lambda shard: shard.status(request_id))

    def waits(self, limit: int) -> list[WaitingRequest]:
        """Return the requests that wait and why, the oldest first, at most `limit`."""
        every = [wait for shard in self.shards for wait in shard.waits(limit)]
        return sorted(every, key=lambda wait: -wait.seconds)[:limit]

    def explain(self, request_id: str) -> Explanation | None:
        for number, shard in enumerate(self.shards):
            explained = shard.explain(request_id)
            if explained is not None:
                return dataclasses.replace(explained, text=f"{explained.text}; data shard {number}")
        return None

    def statistics(self) -> SchedulerStatistics:
        """Return the sums over the shards; the figures of each are in `shards`."""
        return summed_figures([shard.statistics() for shard in self.shards], self._step, len(self._flights))

    def check_integrity(self) -> None:
        for shard in self.shards:
            shard.check_integrity()

    # -- internal

    def _fill(self, shard: ShardScheduler) -> bool:
        """Move requests that other shards have no room for to a shard with room. True if any moved."""
        moved: list[Sequence] = []
        for donor in sorted(self.shards, key=lambda other: -other.waiting):
            while donor is not shard and (head := donor.blocked_head) is not None and shard.has_room(head, moved):
                donor.give(head)
                shard.take(head)
                moved.append(head)
        self.moved += len(moved)
        return bool(moved)

    def _first(self, query: Callable[[ShardScheduler], T | None]) -> T | None:
        return next((answer for answer in map(query, self.shards) if answer is not None), None)


def summed_figures(shards: Items[SchedulerStatistics], steps: int, in_flight: int) -> SchedulerStatistics:
    """Sum the figures of several data shards into one scheduler's; a step is one of all shards together."""
    special = {"reserve_fraction", "steps", "steps_in_flight", "cache", "drafters", "shards"}
    names = [field.name for field in dataclasses.fields(SchedulerStatistics) if field.name not in special]
    caches = [shard.cache for shard in shards if shard.cache is not None]
    return SchedulerStatistics(
        **{name: sum(getattr(shard, name) for shard in shards) for name in names},
        reserve_fraction=sum(shard.reserve_fraction for shard in shards) / len(shards),
        steps=steps,
        steps_in_flight=in_flight,
        cache=summed(caches) if caches else None,
        drafters=summed_counts([shard.drafters for shard in shards]),
        shards=tuple(shards),
    )
