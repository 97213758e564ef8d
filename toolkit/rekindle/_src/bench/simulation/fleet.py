"""A fleet in simulated time: the real scheduler, prefix cache and routers over steps that take what a model says.

Each replica has the scheduler and the prefix cache of a session; only the device is replaced, by `StepCost`. As in a
session, a step is planned while the one before it runs, so a request that comes meanwhile waits for the next one.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from rekindle._src.bench.simulation.loads import Ask, percentile
from rekindle._src.bench.simulation.step_cost import StepCost, StepWork
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import Request, RowResult, StepPlan, StepResult
from rekindle._src.core.sampling import Sampling
from rekindle._src.kvcache.pool import PagePool
from rekindle._src.kvcache.tree import PrefixCache
from rekindle._src.replicas.routing import Keys, Load, Router
from rekindle._src.replicas.routing import router as router_named
from rekindle._src.scheduling.limits import Limits
from rekindle._src.scheduling.scheduler import Scheduler

_PREFILL_ROWS = 8


class Replica:
    """One replica: a scheduler, and the steps that its device has in hand."""

    def __init__(self, name: str, config: EngineConfig, cost: StepCost) -> None:
        assert config.page_size is not None, "the config is not resolved"
        assert config.device_pages is not None, "the config is not resolved"
        self.name, self._cost = name, cost
        limits = Limits.of(config, max_prefill_rows=_PREFILL_ROWS, padded=False)
        self.places = config.max_queue + config.max_requests
        limits = dataclasses.replace(limits, max_queue=self.places)
        pool = PagePool(config.device_pages)
        cache = PrefixCache(pool, config.page_size, b"simulated") if config.prefix_cache else None
        self.scheduler: Scheduler = Scheduler(limits, pool, cache=cache, policy=config.policy, seed=0)
        self.inside = 0
        self.routed = 0
        self.busy = 0.0
        self._running: StepPlan | None = None
        self._next: StepPlan | None = None  # planned while that runs

    def wake(self) -> float | None:
        """Begin a step if none runs: how long it takes, or None."""
        if self._running is not None:
            return None
        self._running = self.scheduler.plan()
        return self._begin()

    def _begin(self) -> float | None:
        if self._running is None:
            return None
        self._next = self.scheduler.plan()
        seconds = self._cost.seconds(StepWork.of(self._running))
        self.busy += seconds
        return seconds

    def ended(self) -> tuple[list[tuple[str, int, bool]], float | None]:
        """The step is over: tokens of its requests, and whether they ended; and how long the next step takes."""
        plan = self._running
        assert plan is not None, "no step was running"
        token = 7  # any: no text is of interest
        rows = tuple(RowResult(row.request.id, row.epoch, token if row.samples else None) for row in plan.rows)
        events = self.scheduler.commit(StepResult(plan, rows))
        made = [(event.request_id, len(event.token_ids), event.finish_reason is not None) for event in events]
        self.inside -= sum(ended for _, _, ended in made)
        self._running = self._next if self._next is not None else self.scheduler.plan()
        self._next = None
        return made, self._begin()


class Outcome(NamedTuple):
    """What a simulation found, or a real run in the same terms. Times in seconds."""

    requests: int
    refused: int  # for want of a place
    seconds: float
    hit_rate: float  # share of the prompt tokens that were cached
    imbalance: float  # requests of the replica that got most, in proportion to the mean
    busy: float  # share of the time in which devices ran steps
    first_token: tuple[float, float]  # p50, p99
    between: tuple[float, float]
    tokens_per_second: float

    def __str__(self) -> str:
        first, between = ([1e3 * value for value in pair] for pair in (self.first_token, self.between))
        return (
            f"{self.hit_rate:6.1%} {first[0]:8.0f} {first[1]:8.0f} {between[0]:8.1f} {between[1]:8.1f} "
            f"{self.tokens_per_second:9.0f} {self.imbalance:6.2f} {self.busy:6.1%} {self.refused:6}"
        )


HEAD = "cached    first      p99  between      p99  tokens/s uneven   busy    429"


class Watch:
    """Collects when tokens came."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.between: list[float] = []
        self.tokens = 0
        self._last: dict[str, float] = {}
        self._asked: dict[str, float] = {}

    def asked(self, name: str, at: float) -> None:
        self._asked[name] = at

    def came(self, name: str, tokens: int, at: float, *, ended: bool) -> None:
        if tokens:
            if name not in self._last:
                self.first.append(at - self._asked[name])
            else:
                self.between += [(at - self._last[name]) / tokens] * tokens
            self._last[name] = at
            self.tokens += tokens
        if ended:
            self._last.pop(name, None)
            del self._asked[name]


def simulate(
    asks: Sequence[Ask], config: EngineConfig, cost: StepCost, *, replicas: int = 1, router: str | Router = "affinity"
) -> Outcome:
    """Run a load on so many replicas."""
    chosen = router_named(router) if isinstance(router, str) else router
    fleet = {f"r{number}": Replica(f"r{number}", config, cost) for number in range(replicas)}
    order = itertools.count()
    queue: list[tuple[float, int, Ask | Replica]] = [(ask.at, next(order), ask) for ask in asks]
    heapq.heapify(queue)
    watch, refused, now = Watch(), 0, 0.0
    longest = config.max_model_len or 1 << 30

    def begin(replica: Replica, seconds: float | None) -> None:
        if seconds is not None:
            heapq.heappush(queue, (now + seconds, next(order), replica))

    while queue:
        now, number, event = heapq.heappop(queue)
        if isinstance(event, Replica):
            made, seconds = event.ended()
            for name, tokens, ended in made:
                watch.came(name, tokens, now, ended=ended)
            begin(event, seconds)
            continue
        loads = [Load(one.name, one.inside, one.places) for one in fleet.values()]
        route = chosen.choose(Keys(event.opening, event.conversation), loads)
        if route is None or event.length + event.output > longest:
            refused += 1
            continue
        replica = fleet[route.name]
        replica.inside += 1
        replica.routed += 1
        name = str(number)
        watch.asked(name, now)
        sampling = Sampling(max_tokens=event.output, ignore_eos=True, seed=0)
        replica.scheduler.submit(Request(name, event.tokens(), sampling))
        begin(replica, replica.wake())
    figures = [one.scheduler.statistics() for one in fleet.values()]
    prompts = sum(one.prompt_tokens for one in figures)
    routed = [one.routed for one in fleet.values()]
    seconds = now - asks[0].at if asks else 0.0
    return Outcome(
        requests=sum(routed),
        refused=refused,
        seconds=seconds,
        hit_rate=sum(one.cached_tokens for one in figures) / prompts if prompts else 0.0,
        imbalance=max(routed) * len(routed) / sum(routed) if sum(routed) else 1.0,
        busy=sum(one.busy for one in fleet.values()) / (seconds * replicas) if seconds else 0.0,
        first_token=(percentile(watch.first, 0.5), percentile(watch.first, 0.99)),
        between=(percentile(watch.between, 0.5), percentile(watch.between, 0.99)),
        tokens_per_second=watch.tokens / seconds if seconds else 0.0,
    )
