"""The engine without tasks, for tests that drive the scheduler with the fake runner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from helpers.fakes import DictTier, FakeInFlight, FakeModel, FakeRunner, make_request
from rekindle._src.core.config import DraftSource
from rekindle._src.core.records import FinishReason, IntArray, Request, StepPlan, TokenEvent
from rekindle._src.dispatch.engine import Engine
from rekindle._src.drafts.plan import of_texts
from rekindle._src.kvcache import Node, PagePool, PrefixCache, SidePlan, root_digest
from rekindle._src.programs.side_caches import STEPS, RecurrentStates, WindowPages
from rekindle._src.scheduling.admission import Reserve
from rekindle._src.scheduling.data_scheduler import DataScheduler, ShardScheduler
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.ready_rows import StepProgramsLike
from rekindle._src.scheduling.scheduler import Limits, Scheduler
from rekindle._src.scheduling.sequence import Sequence as Scheduled


class NoReserve(Reserve):
    """Admits whoever fits right now, so that pages run out and requests are preempted."""

    def pages(self, sequences: Iterable[Scheduled]) -> int:
        return 0


class Loop:
    """Runs turns of an engine; with `overlap` a step is planned before the one in flight is committed.

    A test that wants other depths plans by itself, appends to `in_flight` and calls `commit`.
    """

    def __init__(
        self, *, pages: int = 256, page_size: int = 8, max_requests: int = 4, max_tokens_per_step: int = 32,
        max_prefill_rows: int = 4, max_model_len: int = 1024, overlap: bool = True, model: FakeModel | None = None,
        prefix_cache: bool = True, host_tier: DictTier | None = None, policy: str = "fcfs", max_queue: int = 1024,
        seed: int | None = None, max_overtakes: int = 64, reserve: Reserve | None = None,
        fail: Callable[[StepPlan], BaseException | None] | None = None, prompt_lookup: int = 0,
        max_beside_decode: int = 1 << 30, shards: int = 1, states: int | None = None, state_step: int = 1,
        edge: int = 1, state_tier: DictTier | None = None, whole: bool = False, least_copied: int | None = None,
        window: int = 0, window_pages: int = 0, programs: StepProgramsLike | None = None, drafts: DraftSource = "auto",
        drafters: Sequence[Drafter] | None = None,
    ) -> None:  # fmt: skip
        """With `states`, the slots of the tree, a model has states, and the tree some at every `state_step` pages.
        With a `window`, it has layers that give pages back; they have enough for all requests, and `window_pages` more.
        It may have both.

        `pages`, `max_requests` and what bounds a step are those of each of the data shards."""
        self.model = model if model is not None else FakeModel()
        limits = Limits(
            max_requests, max_tokens_per_step, max_model_len, page_size, max_prefill_rows, max_queue,
            max_beside_decode, edge=edge, whole=whole,
        )  # fmt: skip
        spare = max(max_requests, 2) if drafts not in ("auto", "none") or prompt_lookup else 0
        own = 1 + max_requests + spare
        plans: list[SidePlan] = []
        if states is not None:
            slots = own + states * prefix_cache
            plans.append(
                RecurrentStates(page_size=page_size, slots=slots, first=own, spare=spare, step=state_step * page_size)
            )
        most = 0
        if window:
            span = -(-window // page_size)
            least = 1 + max_requests * (span + 2) + -(-STEPS * max_tokens_per_step // page_size)
            most = min(pages + 1, least + window_pages)
            reserved = 0 if most == pages + 1 else least - 1
            sizes = {"page_size": page_size, "slots": most, "first": 1, "step": page_size}
            plans.append(WindowPages(**sizes, span=span, window=window, reserved=reserved))
        side_tiers = [state_tier, None if state_tier is None else DictTier(1000)][: len(plans)]
        self.sides = [plan.cache(side_tiers[number], number=number) for number, plan in enumerate(plans)]
        self.pools = [PagePool(pages + 1, first=shard * (pages + 1)) for shard in range(shards)]
        self.pool = self.pools[0]
        self.pool_page_size = page_size
        self.ticks = itertools.count(1)
        self.caches = [
            PrefixCache(
                pool,
                page_size,
                root_digest("fake"),
                host_tier=host_tier,
                sides=self.sides if prefix_cache else (),
                least_copied=least_copied,
                clock=lambda: float(next(self.ticks)),
            )
            for pool in self.pools
        ]
        self.cache = self.caches[0]
        options: dict[str, Any] = {"policy": policy, "seed": seed, "max_overtakes": max_overtakes, "reserve": reserve}
        of_text = [kind.drafter(limits) for kind in of_texts(drafts, prompt_lookup)]
        options["drafters"] = of_text if drafters is None else drafters
        cached = [cache if prefix_cache else None for cache in self.caches]
        self.scheduler = Scheduler(limits, self.pool, cache=cached[0], sides=self.sides, programs=programs, **options)
        self.shards: list[ShardScheduler] = []
        if shards > 1:
            arrivals = itertools.count()
            self.shards = [
                ShardScheduler(
                    limits, pool, arrivals=arrivals, first_slot=shard * max_requests, cache=cached[shard], **options
                )
                for shard, pool in enumerate(self.pools)
            ]
            self.scheduler = cast(Any, DataScheduler(self.shards))  # it answers to the same
        self.runner = FakeRunner(
            num_pages=shards * (pages + 1),
            page_size=page_size,
            max_requests=max_requests if shards == 1 else shards * max(max_requests, 2),  # drafts fill up two rows
            max_tokens_per_step=shards * max_tokens_per_step,
            max_prefill_rows=shards * max_prefill_rows,
            model=self.model,
            host_tier=host_tier,
            fail=fail,
            states=0 if states is None else own + states,
            side_tiers=side_tiers,
            window_pages=most,
            window=window,
        )
        self.events: dict[str, list[TokenEvent]] = {}
        self.engine = Engine(self.scheduler, self.runner, ahead=overlap)
        self.in_flight: list[FakeInFlight] = []  # dispatched by a test

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.events[request.id] = []

    def take(self, *events: TokenEvent | None) -> None:
        for event in events:
            if event is not None:
                cause = None if event.error is None else event.error.__cause__
                if isinstance(cause, AssertionError):  # raised by the fake runner
                    raise cause
                past = self.events[event.request_id]
                assert not past or past[-1].finish_reason is None, f"{event} after the end"
                past.append(event)

    def step(self) -> bool:
        """One turn; False when there is nothing to do."""
        if self.in_flight:
            self.commit()
            return True
        events = self.engine.turn()
        self.take(*events or ())
        return events is not None

    def commit(self) -> None:
        self.take(*self.scheduler.commit(self.runner.fetch(self.in_flight.pop(0))))

    def dispatch(self, steps: int) -> None:
        """Plan and dispatch steps, and leave them in flight."""
        for _ in range(steps):
            plan = self.scheduler.plan()
            assert plan is not None
            self.in_flight.append(self.runner.dispatch(plan))

    def run(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.step():
                assert not self.scheduler.has_work, "the scheduler has work but plans nothing"
                self.scheduler.check_integrity()
                return
        raise AssertionError(f"not done after {most} steps")

    def output(self, request: Request) -> list[int]:
        return [token for event in self.events[request.id] for token in event.token_ids]

    def reason(self, request: Request) -> FinishReason | None:
        return self.events[request.id][-1].finish_reason if self.events[request.id] else None


def exact(loop: Loop, *requests: Request) -> None:
    """Check that requests have the tokens of the plain loop."""
    for request in requests:
        assert loop.output(request) == loop.model.generate(request), request.id


def cached(loop: Loop, request: Request) -> int:
    explanation = loop.scheduler.explain(request.id)
    assert explanation is not None
    return explanation.cached_tokens


def answered(loop: Loop, *prompts: list[int], max_tokens: int = 6) -> list[Request]:
    """Run prompts to their ends, and check their tokens."""
    requests = [make_request(prompt, max_tokens=max_tokens) for prompt in prompts]
    for request in requests:
        loop.submit(request)
    loop.run()
    exact(loop, *requests)
    return requests


def text(count: int, *suffix: int) -> list[int]:
    """Return a prompt that begins with the same `count` tokens each time."""
    return [position * 7 % 90 for position in range(count)] + list(suffix)


def prefix_of(cache: PrefixCache, node: Node) -> IntArray:
    """Return all tokens up to and including a node's page."""
    pages = []
    while node.parent is not None:
        pages.append(cache.tokens_of(node))
        node = node.parent
    return np.concatenate(pages[::-1])
