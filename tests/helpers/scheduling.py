"""The engine without tasks, for tests that drive the scheduler with the fake runner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypedDict, Unpack, cast

import numpy as np

from helpers.fakes import DictTier, FakeInFlight, FakeModel, FakeRunner, make_request
from rekindle._src.core.config import DraftSource
from rekindle._src.core.records import FinishReason, IntArray, Request, StepPlan, TokenEvent
from rekindle._src.data_shards.scheduler import DataScheduler, ShardScheduler
from rekindle._src.dispatch.engine import Engine
from rekindle._src.drafts.plan import of_texts
from rekindle._src.kvcache import AnyCache, Node, PagePool, PrefixCache, SidePlan, root_digest
from rekindle._src.programs.side_caches import STEPS, RecurrentStates, WindowPages
from rekindle._src.scheduling.admission import Reserve
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.ready_rows import StepProgramsLike
from rekindle._src.scheduling.scheduler import Limits, Scheduler
from rekindle._src.scheduling.sequence import Sequence as Scheduled


class NoReserve(Reserve):
    """Admits whoever fits right now, so that pages run out and requests are preempted."""

    def pages(self, sequences: Iterable[Scheduled]) -> int:
        return 0


class Sizes(TypedDict, total=False):
    """How much there is room for: `pages`, `max_requests` and the bounds of a step are those of each data shard."""

    pages: int
    page_size: int
    max_requests: int
    max_tokens_per_step: int
    max_prefill_rows: int
    max_model_len: int
    overlap: bool
    model: FakeModel | None


class QueueOptions(TypedDict, total=False):
    """The order in which requests are admitted."""

    policy: str
    max_queue: int
    seed: int | None
    max_overtakes: int
    reserve: Reserve | None


class CacheOptions(TypedDict, total=False):
    """The pages that a request finds, and the tier below the device."""

    prefixes: bool
    host_tier: DictTier | None
    least_copied: int | None


class DraftOptions(TypedDict, total=False):
    """Drafts of texts by their source and by lookup, or other drafters."""

    source: DraftSource
    lookup: int
    drafters: Sequence[Drafter] | None


class StateOptions(TypedDict, total=False):
    """A model's states: `slots` of the tree, with one at every `step` pages. Chunks end at multiples of `edge`."""

    slots: int | None
    step: int
    edge: int
    tier: DictTier | None


class WindowOptions(TypedDict, total=False):
    """Layers that give pages back after `positions`. All requests have enough, and there are `pages` more."""

    positions: int
    pages: int


class StepOptions(TypedDict, total=False):
    """The limits of a step, the programs that it needs, and its failures."""

    max_beside_decode: int
    whole: bool
    repeated: int
    programs: StepProgramsLike | None
    fail: Callable[[StepPlan], BaseException | None] | None


class LoopBuilder:
    """The parts of a loop, each set by a method of its own; a model may have states and a window."""

    def __init__(self, **sizes: Unpack[Sizes]) -> None:
        self._sizes: Sizes = {
            "pages": 256, "page_size": 8, "max_requests": 4, "max_tokens_per_step": 32, "max_prefill_rows": 4,
            "max_model_len": 1024, "overlap": True, "model": None,
        }  # fmt: skip
        self._queue: QueueOptions = {
            "policy": "fcfs", "max_queue": 1024, "seed": None, "max_overtakes": 64, "reserve": None
        }  # fmt: skip
        self._cache: CacheOptions = {"prefixes": True, "host_tier": None, "least_copied": None}
        self._drafts: DraftOptions = {"source": "auto", "lookup": 0, "drafters": None}
        self._states: StateOptions = {"slots": None, "step": 1, "edge": 1, "tier": None}
        self._window: WindowOptions = {"positions": 0, "pages": 0}
        self._steps: StepOptions = {
            "max_beside_decode": 1 << 30, "whole": False, "repeated": 1, "programs": None, "fail": None
        }  # fmt: skip
        self._shards = 1
        self._sizes.update(sizes)

    def sizes(self, **sizes: Unpack[Sizes]) -> Self:
        self._sizes.update(sizes)
        return self

    def queue(self, **options: Unpack[QueueOptions]) -> Self:
        self._queue.update(options)
        return self

    def cache(self, **options: Unpack[CacheOptions]) -> Self:
        self._cache.update(options)
        return self

    def drafts(self, **options: Unpack[DraftOptions]) -> Self:
        self._drafts.update(options)
        return self

    def states(self, **options: Unpack[StateOptions]) -> Self:
        self._states.update(options)
        return self

    def window(self, **options: Unpack[WindowOptions]) -> Self:
        self._window.update(options)
        return self

    def steps(self, **options: Unpack[StepOptions]) -> Self:
        self._steps.update(options)
        return self

    def shards(self, count: int) -> Self:
        self._shards = count
        return self

    def loop(self, kind: type[Loop] | None = None) -> Loop:
        sizes = self._sizes
        model = sizes["model"] or FakeModel()
        plans, window_pages = self._side_plans()
        tiers = [self._states["tier"], None if self._states["tier"] is None else DictTier(1000)][: len(plans)]
        sides = [plan.cache(tiers[number], number=number) for number, plan in enumerate(plans)]
        pages = sizes["pages"] + 1
        pools = [PagePool(pages, first=shard * pages) for shard in range(self._shards)]
        ticks = itertools.count(1)
        caches = [
            PrefixCache(
                pool, sizes["page_size"], root_digest("fake"), host_tier=self._cache["host_tier"],
                sides=sides if self._cache["prefixes"] else (), least_copied=self._cache["least_copied"],
                clock=lambda: float(next(ticks)),
            )
            for pool in pools
        ]  # fmt: skip
        runner = FakeRunner(
            num_pages=self._shards * pages,
            page_size=sizes["page_size"],
            # Drafts of several shards fill up two rows.
            max_requests=sizes["max_requests"] if self._shards == 1 else self._shards * max(sizes["max_requests"], 2),
            max_tokens_per_step=self._shards * sizes["max_tokens_per_step"],
            max_prefill_rows=self._shards * sizes["max_prefill_rows"],
            model=model,
            host_tier=self._cache["host_tier"],
            fail=self._steps["fail"],
            states=0 if self._states["slots"] is None else self._own_slots + self._states["slots"],
            side_tiers=tiers,
            window_pages=window_pages,
            window=self._window["positions"],
        )
        schedulers = self._schedulers(pools, caches, sides)
        return (kind or Loop)(schedulers, runner, caches, sides, overlap=sizes["overlap"])

    @property
    def _spare(self) -> int:
        """The states that drafts can be refused into."""
        of_texts = self._drafts["source"] not in ("auto", "none") or self._drafts["lookup"]
        return max(self._sizes["max_requests"], 2) if of_texts else 0

    @property
    def _own_slots(self) -> int:
        return 1 + self._sizes["max_requests"] + self._spare

    def _side_plans(self) -> tuple[list[SidePlan], int]:
        """Return the caches of states and windows, and how many pages the window's has."""
        page_size, max_requests, pages = (self._sizes[name] for name in ("page_size", "max_requests", "pages"))
        own, plans = self._own_slots, list[SidePlan]()
        if self._states["slots"] is not None:
            slots, step = own + self._states["slots"] * self._cache["prefixes"], self._states["step"] * page_size
            plans.append(RecurrentStates(page_size=page_size, slots=slots, first=own, spare=self._spare, step=step))
        positions = self._window["positions"]
        if not positions:
            return plans, 0
        span = -(-positions // page_size)
        least = 1 + max_requests * (span + 2) + -(-STEPS * self._sizes["max_tokens_per_step"] // page_size)
        most = min(pages + 1, least + self._window["pages"])
        reserved = 0 if most == pages + 1 else least - 1
        sizes = {"page_size": page_size, "slots": most, "first": 1, "step": page_size}
        plans.append(WindowPages(**sizes, span=span, window=positions, reserved=reserved))
        return plans, most

    def _schedulers(
        self, pools: list[PagePool], caches: list[PrefixCache], sides: list[AnyCache]
    ) -> list[Scheduler] | list[ShardScheduler]:
        """Return the scheduler, or those of the data shards."""
        sizes, queue, drafts = self._sizes, self._queue, self._drafts
        limits = Limits(
            sizes["max_requests"], sizes["max_tokens_per_step"], sizes["max_model_len"], sizes["page_size"],
            sizes["max_prefill_rows"], queue["max_queue"], self._steps["max_beside_decode"],
            edge=self._states["edge"], whole=self._steps["whole"], repeated_steps=self._steps["repeated"],
        )  # fmt: skip
        options: dict[str, Any] = {name: queue[name] for name in ("policy", "seed", "max_overtakes", "reserve")}
        of_text = [kind.drafter(limits) for kind in of_texts(drafts["source"], drafts["lookup"])]
        options["drafters"] = of_text if drafts["drafters"] is None else drafts["drafters"]
        cached = [cache if self._cache["prefixes"] else None for cache in caches]
        if self._shards == 1:
            programs = self._steps["programs"]
            return [Scheduler(limits, pools[0], cache=cached[0], sides=sides, programs=programs, **options)]
        arrivals = itertools.count()
        return [
            ShardScheduler(
                limits, pool, arrivals=arrivals, first_slot=number * limits.max_requests, cache=cache, **options
            )
            for number, (pool, cache) in enumerate(zip(pools, cached, strict=True))
        ]


class Loop:
    """Runs turns of an engine; with `overlap` a step is planned before the one in flight is committed.

    A test that wants other depths plans by itself, appends to `in_flight` and calls `commit`.
    """

    def __init__(
        self,
        schedulers: list[Scheduler] | list[ShardScheduler],
        runner: FakeRunner,
        caches: list[PrefixCache],
        sides: list[AnyCache],
        *,
        overlap: bool,
    ) -> None:
        self.runner, self.caches, self.cache, self.sides = runner, caches, caches[0], sides
        self.model, self.pools, self.pool = runner.model, [cache.pool for cache in caches], caches[0].pool
        self.shards: list[ShardScheduler] = [one for one in schedulers if isinstance(one, ShardScheduler)]
        # The scheduler of data shards answers to the same calls.
        self.scheduler = cast(Any, DataScheduler(self.shards)) if self.shards else cast(Scheduler, schedulers[0])
        self.events: dict[str, list[TokenEvent]] = {}
        self.engine = Engine(self.scheduler, runner, ahead=overlap)
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
