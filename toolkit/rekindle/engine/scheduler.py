"""The scheduler: decides which request computes which tokens in each step, and takes the results over.

It is pure host state with one owner. A step N+1 is planned before the result of step N is known: every count that a
plan needs (tokens sampled, positions computed, slots, pages) is known without token values. Only an end by token value
(eos, stop) is discovered late; the row that was planned meanwhile is dropped when its step is committed, and slots and
pages go back then, never while a step in flight may still use them.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque

import numpy as np

from rekindle.cache.pool import PagePool, pages_for
from rekindle.config import EngineConfig
from rekindle.engine.sequence import Sequence
from rekindle.errors import InvalidRequest, OutOfPages, PromptTooLong, QueueFull, StepFailed
from rekindle.records import FinishReason, Request, Row, RowResult, Status, StepPlan, StepResult, TokenEvent

_REMEMBERED = 1024  # ended requests whose status can still be asked for


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that bound a step and the queue."""

    max_requests: int
    max_tokens_per_step: int
    max_model_len: int
    page_size: int
    max_prefill_rows: int = 1 << 30
    max_queue: int = 1024

    @classmethod
    def of(cls, config: EngineConfig, *, max_prefill_rows: int) -> Limits:
        """From a resolved config."""
        assert config.max_model_len is not None and config.page_size is not None, "the config is not resolved"
        return cls(
            max_requests=config.max_requests,
            max_tokens_per_step=config.max_tokens_per_step,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            max_prefill_rows=max_prefill_rows,
            max_queue=config.max_queue,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    sequences: tuple[Sequence, ...]  # in the order of plan.rows


class Scheduler:
    """Satisfies `SchedulerLike`."""

    def __init__(self, limits: Limits, pool: PagePool) -> None:
        self.limits, self.pool = limits, pool
        self._alive: dict[str, Sequence] = {}
        self._ended: OrderedDict[str, Status] = OrderedDict()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._leaving: set[Sequence] = set()  # ended or preempted, but a step in flight still contains them
        self._free_slots = list(range(limits.max_requests - 1, -1, -1))
        self._flights: deque[_Flight] = deque()
        self._step = 0
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._flights)

    def submit(self, request: Request) -> None:
        """Queue it. Raises `PromptTooLong`, `OutOfPages` or `QueueFull`; the scheduler is unchanged then."""
        limits, length = self.limits, request.prompt_length
        if request.id in self._alive:
            raise InvalidRequest("id", request.id, "is the id of a request that is still alive", "Use a new id")
        if length >= limits.max_model_len:
            raise PromptTooLong(
                "prompt",
                f"{length} tokens",
                f"max_model_len is {limits.max_model_len}",
                "Shorten it, or open with more",
            )
        if pages_for(length, limits.page_size) > self.pool.total:
            raise OutOfPages(
                f"the prompt's {length} tokens need {pages_for(length, limits.page_size)} pages of {limits.page_size}, "
                f"the pool has {self.pool.total}. Raise device_memory or device_pages"
            )
        if len(self._waiting) >= limits.max_queue:
            raise QueueFull(f"{len(self._waiting)} requests wait, max_queue is {limits.max_queue}. Submit later")
        # The last token is sampled but its keys are never needed, hence one more than the pool holds.
        room = min(limits.max_model_len, self.pool.total * limits.page_size + 1) - length
        if request.sampling.max_tokens <= room:
            limit, reason = request.sampling.max_tokens, FinishReason.LENGTH
        else:
            limit, reason = room, FinishReason.CONTEXT
        sequence = Sequence(request, self._arrivals, limit, reason)
        self._arrivals += 1
        self._alive[request.id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End it wherever it is. Pages that a step in flight still writes return when that step is committed."""
        return self._end_by_id(request_id, FinishReason.ABORTED)

    def finish(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        """End a running request from outside: the detokenizer found a stop string."""
        return self._end_by_id(request_id, reason)

    def plan(self) -> StepPlan | None:
        """The next step, assuming that every step planned before succeeds."""
        budget = self.limits.max_tokens_per_step
        decode: list[tuple[Sequence, Row]] = []
        prefill: list[tuple[Sequence, Row]] = []
        prefilling = any(sequence.prefilling for sequence in self._running)
        for sequence in tuple(self._running):
            if sequence.prefilling or not sequence.remaining or sequence not in self._running:
                continue
            if budget <= prefilling:
                break
            if self._grow(sequence):
                decode.append((sequence, self._row(sequence, 1)))
                budget -= 1
        for sequence in self._running:
            if sequence.prefilling and budget and len(prefill) < self.limits.max_prefill_rows:
                length = min(budget, sequence.target - sequence.planned)
                prefill.append((sequence, self._row(sequence, length)))
                budget -= length
        while self._waiting and self._free_slots and budget and len(prefill) < self.limits.max_prefill_rows:
            sequence = self._waiting[0]
            pages = pages_for(sequence.known, self.limits.page_size)
            if sequence.in_flight or not self.pool.can_take(pages):
                break
            self._waiting.popleft()
            sequence.pages = self.pool.take(pages)
            sequence.begin(self._free_slots.pop(), 0)
            self._running.append(sequence)
            self._running.sort(key=_seniority)
            length = min(budget, sequence.target)
            prefill.append((sequence, self._row(sequence, length)))
            budget -= length
        if not decode and not prefill:
            return None
        plan = StepPlan(self._step, tuple(row for _, row in decode), tuple(row for _, row in prefill))
        self._step += 1
        self._flights.append(_Flight(plan, tuple(sequence for sequence, _ in decode + prefill)))
        return plan

    def commit(self, result: StepResult) -> tuple[TokenEvent, ...]:
        """Take a step's tokens over, in the order in which the steps were planned."""
        flight = self._flights.popleft()
        assert flight.plan is result.plan, f"step {result.plan.step} committed before step {flight.plan.step}"
        events = []
        for sequence, row, output in zip(flight.sequences, flight.plan.rows, result.rows, strict=True):
            sequence.in_flight -= 1
            if not sequence.ended:
                event = self._take_over(sequence, row, output)
                if event is not None:
                    events.append(event)
            self._drain(sequence)
        return tuple(events)

    def fail(self, plan: StepPlan, cause: BaseException) -> tuple[TokenEvent, ...]:
        """A planned step raised: its requests end with `StepFailed`, everything else goes on."""
        flight = next(flight for flight in self._flights if flight.plan is plan)
        self._flights.remove(flight)
        events = []
        for sequence in flight.sequences:
            sequence.in_flight -= 1
            if not sequence.ended:
                error = StepFailed(f"step {plan.step}, which carried this request, raised {cause!r}. Submit it again")
                error.__cause__ = cause
                events.append(self._end(sequence, FinishReason.FAILED, error=error))
            self._drain(sequence)
        return tuple(events)

    def status(self, request_id: str) -> Status | None:
        sequence = self._alive.get(request_id)
        return sequence.status if sequence is not None else self._ended.get(request_id)

    def explain(self, request_id: str) -> str:
        return str(self.status(request_id))

    def statistics(self) -> dict[str, int]:
        return {"waiting": len(self._waiting), "running": len(self._running)}

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + held + cached pages are all pages, each with its right count."""
        expected = np.zeros(self.pool.num_pages, np.int32)
        owners = [*self._running, *self._leaving]
        for sequence in owners:
            np.add.at(expected, sequence.pages, 1)
        self.pool.check_integrity(expected)
        slots = sorted([*self._free_slots, *(sequence.slot for sequence in owners)])
        assert slots == list(range(self.limits.max_requests)), f"slots drifted: {slots}"

    def _row(self, sequence: Sequence, length: int) -> Row:
        start = sequence.planned
        end = start + length
        decode = start >= sequence.target
        samples = end >= sequence.target
        row = Row(
            request=sequence.request,
            epoch=sequence.epoch,
            slot=sequence.slot,
            start=start,
            length=length,
            pages=np.array(sequence.pages[: pages_for(end, self.limits.page_size)], np.int32),
            token_ids=None if decode else sequence.tokens(start, end),
            samples=samples,
            fresh=sequence.fresh,
            generated=sequence.sampled,
            outputs=sequence.outputs() if sequence.fresh and sequence.generated else None,
        )
        sequence.fresh = False
        sequence.planned = end
        sequence.sampled += samples
        sequence.in_flight += 1
        return row

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure that the next position has a page; False if it has to sit this step out."""
        while sequence.planned >= len(sequence.pages) * self.limits.page_size:
            if self.pool.can_take(1):
                sequence.pages += self.pool.take(1)
                return True
            if self._leaving:
                return False  # their pages come back with the steps in flight
            self._preempt(self._running[-1])
            if sequence.status is Status.PREEMPTED:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.status = Status.PREEMPTED
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)
        self._leaving.add(sequence)
        self._drain(sequence)

    def _take_over(self, sequence: Sequence, row: Row, output: RowResult) -> TokenEvent | None:
        request = sequence.request
        sequence.computed = row.start + row.length
        # Positions that a preemption made the sequence compute again were scored before.
        prompt_logprobs = output.prompt_logprobs[max(0, sequence.scored - row.start) :]
        sequence.scored = max(sequence.scored, min(sequence.computed, request.prompt_length))
        if not row.samples:
            if not prompt_logprobs:
                return None
            return TokenEvent(request.id, prompt_logprobs=prompt_logprobs, cached_tokens=sequence.cached_tokens)
        token = output.token_id
        assert token is not None, f"{request.id}: step {self._step} sampled no token"
        sequence.append(token)
        if sequence.status is Status.PREFILL:
            sequence.status = Status.DECODE
        tokens, logprobs = (token,), () if output.logprobs is None else (output.logprobs,)
        reason = None
        if sequence.generated > request.sampling.min_tokens:
            if token in request.eos_ids:
                reason = FinishReason.EOS
            elif token in request.stop_ids:
                reason = FinishReason.STOP
        if reason is None and sequence.generated >= sequence.limit:
            reason = sequence.limit_reason
        if reason is None:
            return TokenEvent(request.id, tokens, logprobs, prompt_logprobs, sequence.cached_tokens)
        self._end(sequence, reason)
        return TokenEvent(request.id, tokens, logprobs, prompt_logprobs, sequence.cached_tokens, reason)

    def _end_by_id(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        sequence = self._alive.get(request_id)
        return None if sequence is None else self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> TokenEvent:
        if sequence.status in (Status.QUEUED, Status.PREEMPTED):
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._leaving.add(sequence)
        sequence.status = {FinishReason.ABORTED: Status.ABORTED, FinishReason.FAILED: Status.FAILED}.get(
            reason, Status.FINISHED
        )
        del self._alive[sequence.id]
        self._ended[sequence.id] = sequence.status
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self._drain(sequence)
        return TokenEvent(sequence.id, cached_tokens=sequence.cached_tokens, finish_reason=reason, error=error)

    def _drain(self, sequence: Sequence) -> None:
        """Give slot and pages of an ended or preempted sequence back once no step in flight contains it."""
        if sequence in self._leaving and not sequence.in_flight:
            self._leaving.remove(sequence)
            self.pool.release(sequence.pages)
            sequence.pages = []
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
            sequence.sampled = sequence.generated


def _seniority(sequence: Sequence) -> int:
    return sequence.arrived
