"""The scheduler: plans each step, the requests in it and their tokens, and applies the results.

It is pure host state with one owner. Step N+1 is planned before the result of step N is known: every count that a plan
needs (tokens sampled, positions computed, slots, pages) is known without token values. Only an end by token value (eos,
stop) is discovered late; the row that was planned meanwhile is dropped when its step is committed, and slot and pages
are returned then, never while a step in flight may still write to them. The exception is a step with drafts: how far
its requests got is known from its result alone, so no step is planned before that.

A step that raised fails every request in it. A row that could not be prepared fails its own request, and a page that
could not be restored fails the requests that hold it; the step runs without them.

The end of a request can't fail. If its pages, slot or claims are inconsistent, it fails, is taken out of
wherever it is, and its pages are in quarantine; requests that hold a page with too few references fail as well, since
it may have been given to another one. Everything else is an invariant of the whole engine, and ends the session: the
order of steps, the parts of a plan, the lists of the pool, and the tree, which has all requests' pages.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any

from rekindle._src.core.activity import NO_WAIT, ProgramWait
from rekindle._src.core.drawable import Record
from rekindle._src.core.own_failure import close_each, one_line, own_failure
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.prompt_hit import PromptHit
from rekindle._src.core.records import (
    FinishReason,
    PageMove,
    Request,
    Row,
    RowResult,
    Status,
    StepPlan,
    StepResult,
    TokenEvent,
    WaitingRequest,
)
from rekindle._src.kvcache.pool import PagePool, pages_for
from rekindle._src.kvcache.side import Keying, SideCache
from rekindle._src.kvcache.tree import CacheStatistics, PrefixCache
from rekindle._src.scheduling.admission import Admission, DeviceRoom, Reserve, RunningSet
from rekindle._src.scheduling.boundaries import Boundaries
from rekindle._src.scheduling.drafting.drafter import DraftCounts, Drafter
from rekindle._src.scheduling.drafting.drafts import Drafts
from rekindle._src.scheduling.ends import broken_error, end_with, not_finite, program_error, request_error, step_error
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.page_runs import PageRuns
from rekindle._src.scheduling.policies import ShortestFirst, WaitingQueue, seniority
from rekindle._src.scheduling.ready_rows import EveryRow, ReadyRows, StepProgramsLike
from rekindle._src.scheduling.repeats import Repeats
from rekindle._src.scheduling.sequence import Explanation, Limits, Sequence, explanation
from rekindle._src.scheduling.side_rules import SideRule, SideRules, WholePrompts
from rekindle._src.scheduling.slow_rows import SlowRows
from rekindle._src.scheduling.timeline import PhaseKind
from rekindle.errors import (
    InvalidRequest,
    OutOfPages,
    QueueFull,
    RekindleError,
)

log = logging.getLogger("rekindle.session")
_REMEMBERED = 1024  # ended requests that can still be explained
_RULES: dict[Keying, Callable[[Limits, SideCache], SideRule[Any]]] = {
    Keying.BOUNDARY: Boundaries,
    Keying.PAGES: PageRuns,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    sequences: tuple[Sequence, ...]  # in the order of plan.rows


class Scheduler:
    """The implementation of `SchedulerLike`. Without a `cache`, requests share no pages."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        *,
        cache: PrefixCache | None = None,
        policy: str = "fcfs",
        seed: int | None = None,
        max_overtakes: int = 64,
        reserve: Reserve | None = None,
        room: DeviceRoom | None = None,
        sides: Items[SideCache] = (),
        first_slot: int = 0,
        arrivals: Iterator[int] | None = None,
        program_wait: ProgramWait = NO_WAIT,
        programs: StepProgramsLike | None = None,
        drafters: Items[Drafter] = (),
    ) -> None:
        """`sides` are the side caches of the model, and belong to `cache` if there is one.

        `arrivals` number the requests, of all data shards if there are several. `program_wait` has the waits of steps
        for programs. Without `programs`, a row joins a step whether its program is ready or not. `drafters` are shared
        by all shards.
        """
        self.limits, self.pool, self.cache = limits, pool, cache
        rules = [_RULES[side.plan.keying](limits, side) for side in sides]
        self._sides = WholePrompts(rules) if limits.whole else SideRules(rules)
        self._ledger = PageLedger(pool, cache, limits.page_size, self._sides)
        self._running_set = RunningSet(limits.max_requests, self._ledger, seniority(policy), room, first_slot)
        shortest = ShortestFirst(self._ledger.uncached) if policy == "sjf" else None
        path = self._ledger.cached_path
        queue = WaitingQueue(policy, path=path, shortest=shortest, seed=seed, max_overtakes=max_overtakes)
        self._admission = Admission(
            limits, self._ledger, self._running_set, queue, reserve or Reserve(), shortest, max_overtakes
        )
        self._ready_rows = EveryRow() if programs is None else ReadyRows(programs, limits, program_wait)
        self._drafts = Drafts(limits, self._ledger, drafters)
        self._slow_rows = SlowRows()
        self._repeats = Repeats(limits, self._ledger)
        self._alive: dict[str, Sequence] = {}
        self._ended: OrderedDict[str, Explanation] = OrderedDict()
        self._program_wait = program_wait
        self._flights: deque[_Flight] = deque()
        self._step = 0
        self._waited = False  # the step that was planned last has drafts
        self._arrivals = itertools.count() if arrivals is None else arrivals
        self.weights_version = 0  # how often weights were swapped
        self._leaving: tuple[PageMove, ...] = ()  # read out because the session goes to sleep
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._failures: list[TokenEvent] = []  # of requests that ended because of others

    @property
    def alive(self) -> Mapping[str, Sequence]:
        """The sequences of requests that wait or run, by their ids."""
        return self._alive

    @property
    def running_set(self) -> RunningSet:
        """The sequences that run, with their pages."""
        return self._running_set

    @property
    def has_work(self) -> bool:
        return bool(self._alive or self._flights)

    @property
    def held(self) -> bool:
        waiting = self._admission.loading > 0 or self._ready_rows.waiting
        return waiting or any(sequence.held for sequence in self._running_set.running)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `PromptTooLong`, `OutOfPages` or `QueueFull`; the scheduler is unchanged then."""
        if request.id in self._alive:
            raise InvalidRequest("id", request.id, "is the id of a request that is still alive", "Use a new id")
        limit, reason = self.limits.room(request, self._ledger.usable(request))
        waiting = self._admission.waiting
        if waiting >= self.limits.max_queue:
            raise QueueFull(f"{waiting} requests wait and max_queue is {self.limits.max_queue}. Submit it later.")
        sequence = Sequence(
            request, next(self._arrivals), limit, reason, self.limits.page_size, self.cache, apart=self.limits.apart
        )
        self._admission.submit(sequence)
        self._counts["submitted"] += 1
        self._alive[request.id] = sequence

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request wherever it is. Pages that a step in flight still writes return when that step is committed."""
        return self.finish(request_id, FinishReason.ABORTED)

    def finish(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        """End a running request from outside: the detokenizer found a stop string."""
        sequence = self._alive.get(request_id)
        if sequence is None:
            return None
        error = self._end(sequence, reason)
        if error is not None:
            return self._failed(sequence, error)
        return TokenEvent(request_id, cached_tokens=sequence.cached_tokens, finish_reason=reason)

    def failures(self) -> tuple[TokenEvent, ...]:
        """Take out the events of requests that failed outside of a step.

        Their program could not be made, or pages which they hold, or need, are in quarantine.
        """
        for sequence, error in self._ready_rows.take_failed():
            self._failures.append(self._fail(sequence, program_error(sequence, error)))
        failures, self._failures = tuple(self._failures), []
        return failures

    # -- one step

    def plan(self, *, now: bool = False) -> StepPlan | None:
        """Plan the next step, assuming that every earlier one succeeds. None while drafts or repeated steps are in
        flight.

        Rows wait until their program is ready, unless the step is to run `now`.
        """
        if self._flights and self._flights[-1].plan.holds_next:
            return None
        if self._sides.ahead:
            self._admission.park_ahead()
        self._admission.make_room()
        budget = self.limits.max_tokens_per_step
        preemptions = self._admission.preemptions
        decode: list[Sequence] = []
        reserved = 0
        for sequence in tuple(self._running_set.running):
            if len(decode) + reserved >= budget:
                break
            if sequence.status is Status.PREEMPTED:
                continue  # a more senior one took its pages, in this plan
            if sequence.held:
                self._admission.abandon(sequence)  # others must not wait for the pages that it would compute
                continue
            if sequence.decodes:
                decode.append(sequence)
            elif sequence.prefilling:
                reserved = 1  # a token of the budget, or decoding juniors would starve it
            elif sequence.remaining and self._admission.ensure_page(sequence):
                decode.append(sequence)
        decode, waiting = self._slow_rows.split(decode)
        decode = self._ready_rows.begin(decode, now=now)
        decode_rows = [self._row(sequence, 1) for sequence in decode]
        budget -= len(decode)
        if decode:
            budget = min(budget, self.limits.max_beside_decode)
        prefill: list[Sequence] = []
        prefill_rows: list[Row] = []
        # A request that was preempted in this plan would take the pages back at once.
        prefills = self._admission.prefills(admitting=preemptions == self._admission.preemptions)
        while budget >= self._sides.least and len(prefill) < self.limits.max_prefill_rows:
            admitted = next(prefills, None)
            if admitted is None:
                break
            if admitted.held:
                continue
            length = 1 if admitted.decodes else self._sides.cut(admitted, budget)
            for extension in admitted.extensions.cutting if length else ():
                room = self.limits.max_tokens_per_step - len(decode) - sum(row.length for row in prefill_rows)
                length = extension.cut(admitted.epoch.planned, length, room)
            if not length:
                break  # it is the first of a later step, which has room for any prompt
            if not self._ready_rows.takes(admitted, length):
                continue  # sequences that share its prompt wait with it rather than compute it again
            if admitted.epoch.fresh:
                self._count_admission(admitted)
            if admitted.decodes:
                decode.append(admitted)
                decode_rows.append(self._row(admitted, 1))
                budget -= 1
                continue
            prefill.append(admitted)
            prefill_rows.append(self._row(admitted, length))
            budget -= prefill_rows[-1].length
        if not decode and not prefill:
            decode = self._slow_rows.alone(
                [sequence for sequence in waiting if sequence.status is not Status.PREEMPTED]
            )
            decode = [sequence for sequence in decode if self._ready_rows.takes(sequence, 1)]
            decode_rows = [self._row(sequence, 1) for sequence in decode]
        awaited = self._drafts.awaited(decode)
        if decode and self._ready_rows.drafts():
            self._drafts.extend(decode, decode_rows, budget, mixed=bool(prefill), ready=self._ready_rows.room)
        tasks = self._drafts.tasks(decode, decode_rows)
        sequences, rows = (*decode, *prefill), (*decode_rows, *prefill_rows)
        entries = self._drafts.entries(sequences, rows, enters=bool(awaited or prefill)) if rows else None
        steps = 1
        if decode and entries is None and not (now or prefill or awaited or tasks or self._admission.waiting):
            steps = self._repeated(decode, decode_rows)
        self._ready_rows.end()
        if not decode and not prefill:
            return None
        plan = StepPlan(
            self._step,
            tuple(decode_rows),
            tuple(prefill_rows),
            *self._ledger.moves(),
            self._running_set.room.loads(),
            self._ledger.copies(self._step),
            tasks,
            awaited,
            entries,
            steps,
        )
        self._drafts.planned(self._step, alone=not self._flights, waited=self._waited)
        self._waited = plan.drafted
        self._flights.append(_Flight(plan, (*decode, *prefill)))
        self._step += 1
        return plan

    def commit(self, result: StepResult) -> tuple[TokenEvent, ...]:
        """Apply a step's result; steps are committed in the order of their plans."""
        flight = self._flights.popleft()
        assert flight.plan is result.plan, f"step {result.plan.step} committed before step {flight.plan.step}"
        self._sides.done(result.plan.sides_in)
        if self.cache is not None:
            self.cache.restore_done(result.plan.restore)
            self.cache.offload_done(result.plan.offload)
            if self.cache.host_tier is not None:
                self.cache.host_tier.observe(result)
        events = self._fail_lost(result) + self._fail_lost_sides(flight, result)
        right, taken = result.valid, list[bool]()
        for sequence, row, output, counts in zip(flight.sequences, flight.plan.rows, result.rows, right, strict=True):
            sequence.epoch.in_flight -= 1
            taken.append(counts and not sequence.ended)
            if output.error is not None and not sequence.ended:
                events.append(self._fail(sequence, request_error(sequence, output.error)))
            elif counts and not sequence.ended:
                try:
                    event = self._take_over(sequence, row, output)
                except BaseException as error:
                    event = self._fail(
                        sequence, own_failure(error, f"a token of {sequence.id} could not be taken over")
                    )
                if event is not None and row.draft:
                    events[-1] = events[-1].merged_with(event)  # the row before is the same request's, and sampled
                elif event is not None:
                    events.append(event)
            self._drain(sequence)
        self._slow_rows.learn(flight.sequences, result)
        self._repeats.learn(result)
        self._drafts.learn(flight.sequences, flight.plan, result, taken)
        if flight.plan.drafted:
            for sequence in dict.fromkeys(flight.sequences):
                if sequence.ended:
                    self._remember(sequence)  # with the drafts of the step that it ended in
        self._collect_released()
        return tuple(events)

    def fail(self, plan: StepPlan, cause: BaseException) -> tuple[TokenEvent, ...]:
        """End the requests of a planned step that raised with `StepFailed`; all others go on."""
        flight = next(flight for flight in self._flights if flight.plan is plan)
        self._flights.remove(flight)
        affected = dict.fromkeys(flight.sequences) | dict.fromkeys(self._continuing(plan.sides_in, self._flights))
        self._sides.done(plan.sides_in)
        self._sides.lose(plan.sides_in)
        for sequence in flight.sequences:
            sequence.epoch.in_flight -= 1
        if self.cache is not None:
            self.cache.restore_done(plan.restore)
            self.cache.offload_done(plan.offload)
            if plan.restore:
                # Later steps may have been planned on pages that were never filled.
                broken = [move.page for move in plan.restore]
                affected |= dict.fromkeys(sequence for sequence, _ in holding(self._running_set.holders, broken))
                self.cache.detach(plan.restore)
        events = []
        for sequence in affected:
            if not sequence.ended:
                events.append(self._fail(sequence, step_error(plan, cause)))
            self._drain(sequence)
        self._collect_released()
        return tuple(events)

    # -- the cache, from outside

    def pin(self, prefix: Prefix) -> int:
        """Keep the cached pages of a prompt until `unpin`. Return how many tokens that covers.

        Raises `OutOfPages`, and pins nothing, if an accepted request could not finish while they are pinned.
        """
        if self.cache is None:
            return 0
        covered = self.cache.pin(prefix)
        for sequence in self._alive.values():
            needed = self._needed(sequence)
            if needed > self.pool.total - self.cache.pinned_pages and needed > self._ledger.usable(sequence.request):
                usable = self._ledger.usable(sequence.request)
                self.cache.unpin(prefix)
                raise OutOfPages(
                    f"Pinning {covered} tokens would leave {usable} pages to request {sequence.id}, which may need "
                    f"{needed}. Pin later or less, or raise device_memory."
                )
        return covered

    def unpin(self, prefix: Prefix) -> int:
        """Undo one `pin`. Return how many tokens are no longer pinned."""
        return self.cache.unpin(prefix) if self.cache is not None else 0

    def forecast(self, request: Request) -> PromptHit:
        """Return where a request would find the beginning of its prompt if it were admitted now; `cache` is there."""
        sequence = Sequence(request, 0, 1, FinishReason.LENGTH, self.limits.page_size)
        return self._ledger.forecast(sequence)

    def flush_cache(self, root_key: bytes | None = None, *, recompute: bool = False, keep: bool = False) -> None:
        """Forget every cached page. For new weights, pass their `root_key` and `recompute` the running requests.

        With `keep`, pages that `vacate` has brought below the device are set aside for when their root comes back.
        """
        if root_key is not None:
            self.weights_version += 1
        elif not recompute:
            self._drafts.forget()
        if self.cache is None and not recompute:
            return
        if self.cache is not None:
            self.cache.reset(root_key, keep=keep)
            self._ledger.reclaim()
        for sequence in tuple(self._running_set.running):
            self._admission.abandon(sequence)
            if recompute:
                self._admission.preempt(sequence, "has to be computed again with new weights")

    def vacate(self) -> tuple[PageMove, ...]:
        """Take the pages of all running requests and of the cache, because their arrays are about to be freed. Requests
        are computed again. Return the pages that have to be read out before; `vacated` follows when that is done.
        """
        for sequence in tuple(self._running_set.running):
            self._admission.preempt(sequence, "gave its pages up, because the session sleeps")
        self._ledger.reclaim()
        if self.cache is not None:
            self._leaving = tuple(self.cache.evict(self.pool.cached))
        return self._leaving + self._sides.vacate()

    def vacated(self) -> None:
        """End the read-out of pages that `vacate` returned: the tiers below the device decide from now on."""
        if self.cache is not None:
            self.cache.offload_done(self._leaving)
        self._leaving = ()

    # -- statistics

    def status(self, request_id: str) -> Status | None:
        sequence = self._alive.get(request_id)
        if sequence is not None:
            return sequence.status
        ended = self._ended.get(request_id)
        return None if ended is None else ended.status

    def waits(self, limit: int) -> list[WaitingRequest]:
        """Return the requests that wait and why, the oldest first, at most `limit`."""
        now = time.perf_counter()
        idle = (Status.QUEUED, Status.LOADING, Status.PREEMPTED)
        waiting = (sequence for sequence in self._alive.values() if sequence.status in idle)
        return [
            WaitingRequest(
                sequence.id, sequence.status, now - sequence.timeline.began, sequence.request.prompt_length,
                self._admission.reason(sequence),
            )
            for sequence in itertools.islice(waiting, limit)
        ]  # fmt: skip

    def explain(self, request_id: str) -> Explanation | None:
        """Explain why a request waits, was preempted, or hit or missed the cache; the latest ended ones are kept."""
        sequence = self._alive.get(request_id)
        if sequence is None:
            return self._ended.get(request_id)
        ahead, reason = self._admission.older(sequence), self._admission.reason(sequence)
        return explanation(sequence, ahead, reason, self._program_wait)

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            waiting=self._admission.waiting,
            parked=self._admission.parked,
            running=len(self._running_set.running),
            leaving=len(self._running_set.leaving),
            steps_in_flight=len(self._flights),
            pages_total=self.pool.total,
            pages_free=self.pool.free,
            pages_held=self.pool.held,
            pages_cached=self.pool.cached,
            reserve_fraction=self._admission.reserve.fraction,
            preemptions=self._admission.preemptions,
            steps=self._step,
            drafted_tokens=self._drafts.drafted.total(),
            drafters=self._drafts.statistics(),
            cache=self.cache.statistics() if self.cache is not None else None,
            shards=(),
            **self._counts,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + held + cached pages are all pages, each with its right count."""
        running_set = self._running_set
        running_set.check_integrity()
        self._admission.check_integrity()
        if self.cache is not None:
            self.cache.check_integrity()
        self.pool.check_integrity(self._ledger.references(running_set.holders))
        self._sides.check_integrity(running_set.holders)
        alive = len(running_set.running) + self._admission.waiting
        assert len(self._alive) == alive, f"{len(self._alive)} requests live, {alive} wait or run"

    # -- internal

    def _take_over(self, sequence: Sequence, row: Row, output: RowResult) -> TokenEvent | None:
        request = sequence.request
        sequence.epoch.computed = row.start + row.length
        output = sequence.extensions.take(row, output)
        if not output.finite:
            return self._fail(sequence, not_finite(sequence))
        if not sequence.generates:
            if sequence.epoch.computed < request.prompt_length:
                self._sides.recede(sequence)
                return None
            if (broken := self._end(sequence, FinishReason.LENGTH)) is not None:
                return self._failed(sequence, broken)
            return output.event(sequence.cached_tokens, FinishReason.LENGTH)
        if row.samples:
            assert output.token_id is not None, f"{request.id} sampled no token"
            sequence.append(output.token_id)
            self._counts["generated_tokens"] += 1
            self._counts["accepted_tokens"] += row.draft
            if sequence.status is Status.PREFILL:
                sequence.status = Status.DECODE
                sequence.enter(PhaseKind.DECODE)
        self._admission.published(sequence, *self._ledger.publish(sequence, self._step - 1))
        if not row.samples:
            return output.event(sequence.cached_tokens, None, self.weights_version) if output.delivers else None
        end = end_with(sequence, output)
        if isinstance(end, RekindleError):
            return self._fail(sequence, end)
        if end is not None and (broken := self._end(sequence, end)) is not None:
            return self._failed(sequence, broken)
        return output.event(sequence.cached_tokens, end, self.weights_version)

    def _fail_lost(self, result: StepResult) -> list[TokenEvent]:
        """End the requests that hold a lost page, which could not be restored, and detach such pages from the cache."""
        if not result.lost:
            return []
        assert self.cache is not None, "a page was restored without a cache"
        causes = {lost.move.page: lost.error for lost in result.lost}
        events = [
            self._fail(sequence, request_error(sequence, causes[page]))
            for sequence, page in holding(self._running_set.holders, causes)
            if not sequence.ended
        ]
        for lost in result.lost:
            if self.cache.host_tier is not None:
                self.cache.host_tier.discard(lost.move.digest)
        self.cache.detach([lost.move for lost in result.lost])
        return events

    def _fail_lost_sides(self, flight: _Flight, result: StepResult) -> list[TokenEvent]:
        """End the requests that continue a lost entry, which could not be filled, and take it from the cache."""
        if not result.lost_sides:
            return []
        causes = {(lost.move.side, lost.move.page): lost.error for lost in result.lost_sides}
        moves = [lost.move for lost in result.lost_sides]
        affected = self._continuing(moves, (flight, *self._flights))
        self._sides.discard(result.lost_sides)
        self._sides.lose(moves)
        return [
            self._fail(sequence, request_error(sequence, causes[slot]))
            for sequence, slot in affected.items()
            if not sequence.ended
        ]

    def _continuing(self, moves: Items[PageMove], flights: Iterable[_Flight]) -> dict[Sequence, tuple[int, int]]:
        """Return the sequences that continue an entry in a slot of `moves`, in `flights` or later, each with the number
        of the side cache and the slot."""
        slots = {(move.side, move.page) for move in moves}
        if not slots:
            return {}
        continuing: dict[Sequence, tuple[int, int]] = {}
        for flight in flights:
            for sequence, row in zip(flight.sequences, flight.plan.rows, strict=True):
                continuing.update((sequence, slot) for slot in self._sides.read_by(row.sides) if slot in slots)
        for sequence in self._running_set.holders:
            continuing.update((sequence, slot) for slot in self._sides.continued(sequence) if slot in slots)
        return continuing

    def _repeated(self, decode: list[Sequence], rows: list[Row]) -> int:
        """Add the rows of further steps to a plan of decode rows. Return how many steps it has then."""
        if len(rows) != len(self._running_set.running):
            return 1  # some have drafts, others wait for pages or programs
        return self._repeats.extend(decode, rows, ready=self._ready_rows.repeats)

    def _row(self, sequence: Sequence, length: int) -> Row:
        """Make a sequence's row in the step being planned."""
        return sequence.row(length, self._sides.row(sequence, length))

    def _fail(self, sequence: Sequence, error: RekindleError) -> TokenEvent:
        if not sequence.ended:
            self._end(sequence, FinishReason.FAILED, str(error))
        return self._failed(sequence, error)

    def _failed(self, sequence: Sequence, error: RekindleError) -> TokenEvent:
        failed = FinishReason.FAILED
        return TokenEvent(sequence.id, cached_tokens=sequence.cached_tokens, finish_reason=failed, error=error)

    def _end(self, sequence: Sequence, reason: FinishReason, words: str = "") -> RekindleError | None:
        """End a sequence. Return an error if it failed because its pages, slot or claims were inconsistent."""
        error = None
        try:
            self._admission.remove(sequence)
        except Exception as cause:
            error = broken_error(sequence, cause)
            reason, words = FinishReason.FAILED, str(error)
            self._close(sequence, reason, words)
            self._set_aside(sequence, cause)
        else:
            self._close(sequence, reason, words)
        return error

    def _drain(self, sequence: Sequence) -> None:
        """Return slot and pages of a leaving sequence, unless a step in flight still contains it."""
        try:
            self._running_set.drain(sequence)
        except Exception as cause:
            if not sequence.ended:  # it was preempted
                self._failures.append(self._close_broken(sequence, cause))
            self._set_aside(sequence, cause)

    def _set_aside(self, sequence: Sequence, cause: BaseException) -> None:
        """Put the pages of a sequence in quarantine and take it out of wherever it is; it has ended."""
        log.error(
            "request %s has ended because its pages, its slot or its claims were inconsistent (%s); its %d "
            "pages are not used again in this session",
            sequence.id, one_line(cause), len(sequence.pages.ids),
        )  # fmt: skip
        miscounted = self._ledger.quarantine(sequence)
        self._admission.expel(sequence)
        self._fail_holders(miscounted, cause)
        for other in tuple(self._alive.values()):
            if self._needed(other) > self._ledger.usable(other.request) and not other.ended:
                self._shorten(other)

    def _shorten(self, sequence: Sequence) -> None:
        """Let a sequence generate as many tokens as fit into the usable pages; end it if there is no room."""
        usable = self._ledger.usable(sequence.request)
        try:
            limit, sequence.limit_reason = self.limits.room(sequence.request, usable)
            if limit <= sequence.tokens.sampled:
                raise OutOfPages(
                    f"Request {sequence.id} has more tokens than fit into the {usable} pages that are left."
                )
            sequence.limit = limit
        except RekindleError as error:
            self._failures.append(self._fail(sequence, error))

    def _fail_holders(self, pages: list[int], cause: BaseException) -> None:
        """End the sequences that hold one of `pages`, which may have been given to several."""
        for other, _ in holding(self._running_set.holders, pages) if pages else ():
            if not other.ended:
                self._failures.append(self._close_broken(other, cause))
            self._set_aside(other, cause)

    def _needed(self, sequence: Sequence) -> int:
        """Return how many pages a sequence has at most."""
        return pages_for(sequence.request.prompt_length + max(1, sequence.limit) - 1, self.limits.page_size)

    def _close_broken(self, sequence: Sequence, cause: BaseException) -> TokenEvent:
        error = broken_error(sequence, cause)
        self._close(sequence, FinishReason.FAILED, str(error))
        return self._failed(sequence, error)

    def _close(self, sequence: Sequence, reason: FinishReason, words: str) -> None:
        sequence.status = _END.get(reason, Status.FINISHED)
        sequence.reason = words or reason.value
        self._counts[sequence.status.value] += 1
        self._alive.pop(sequence.id, None)
        sequence.ended_at = time.perf_counter()
        self._drafts.end(sequence)
        close_each(f"request {sequence.id}", lambda: self._remember(sequence))

    def _remember(self, sequence: Sequence) -> None:
        """Keep the explanation of a sequence that ended."""
        self._ended[sequence.id] = explanation(sequence, 0, sequence.reason, self._program_wait, end=sequence.ended_at)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _count_admission(self, sequence: Sequence) -> None:
        start = sequence.epoch.planned
        if sequence.epoch.number == 1:
            self._counts["prompt_tokens"] += sequence.request.prompt_length
            self._counts["cached_tokens"] += sequence.cached_tokens
        self._counts["prefill_tokens"] += sequence.epoch.target - start

    def _collect_released(self) -> None:
        miscounted = self._ledger.collect(self._flights[0].plan.step if self._flights else None)
        if miscounted:
            cause = AssertionError(f"pages {miscounted[:8]} were released too often")
            log.error("%s; they are not used again in this session", cause)
            self._fail_holders(miscounted, cause)


def holding(sequences: Iterable[Sequence], pages: Iterable[int]) -> list[tuple[Sequence, int]]:
    """Return the sequences that hold one of `pages`, each with the first such page of its table."""
    targets = set(pages)
    holders = []
    for sequence in sequences:
        page = next((page for page in sequence.pages.ids.tolist() if page in targets), None)
        if page is not None:
            holders.append((sequence, page))
    return holders


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SchedulerStatistics(Record):
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
    drafted_tokens: int  # proposed by drafters and computed
    accepted_tokens: int  # drafted tokens that the model sampled as well
    cache: CacheStatistics | None
    drafters: Mapping[str, DraftCounts] = dataclasses.field(default_factory=dict)  # what each of them has brought
    shards: tuple[SchedulerStatistics, ...] = ()  # of a mesh with several data shards: the figures of each

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that did not have to be computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


_COUNTS = (
    "submitted", "finished", "aborted", "failed", "prompt_tokens", "cached_tokens", "prefill_tokens",
    "generated_tokens", "accepted_tokens",
)  # fmt: skip
_END = {FinishReason.ABORTED: Status.ABORTED, FinishReason.FAILED: Status.FAILED}
