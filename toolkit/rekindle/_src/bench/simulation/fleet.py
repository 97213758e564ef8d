"""A fleet in simulated time: the real scheduler, prefix cache and routers over steps whose time a model gives.

Each replica has the scheduler and the prefix cache of a session; only the device is replaced, by `StepCost`. As in a
session, a step is planned while the one before it runs, so a request that arrives meanwhile waits for the next one.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from rekindle._src.bench.simulation.loads import SimulatedRequest, percentile
from rekindle._src.bench.simulation.step_cost import StepCost, StepWork
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import Request, Resumed, RowResult, StepPlan, StepResult
from rekindle._src.core.sampling import Sampling
from rekindle._src.kvcache.pool import PagePool
from rekindle._src.kvcache.tree import PrefixCache
from rekindle._src.replicas.roles import Role, goes_two_ways, prompt_only, roles_of
from rekindle._src.replicas.routing import Keys, Load, Router
from rekindle._src.replicas.routing import router as router_named
from rekindle._src.scheduling.limits import Limits
from rekindle._src.scheduling.scheduler import Scheduler

_PREFILL_ROWS = 8
_TOKEN = 7  # any id: the text does not matter


class Arrived:
    """The host memory of a replica that decodes, as its prefix cache sees it: it holds all pages that were moved."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.digests

    def has(self, digest: bytes) -> bool:
        return digest in self.digests

    def should_offload(self, digest: bytes) -> bool:
        return False

    def touch(self, digest: bytes) -> None: ...

    def hold(self, digest: bytes) -> None: ...

    def release(self, digest: bytes) -> None:
        self.digests.discard(digest)  # it is on the device

    def discard(self, digest: bytes) -> None:
        self.digests.discard(digest)

    def trim(self) -> None: ...

    def clear(self) -> None:
        self.digests.clear()

    def worth(self, pages: int) -> bool:
        return True

    def observe(self, result: StepResult) -> None: ...


class Replica:
    """One replica: a scheduler and the steps on its device."""

    def __init__(
        self, name: str, config: EngineConfig, cost: StepCost, role: Role = "both", spread: Sequence[float] = ()
    ) -> None:
        assert config.page_size is not None, "the config is not resolved"
        assert config.device_pages is not None, "the config is not resolved"
        self.name, self._cost, self.role = name, cost, role
        self._spread, self._draw = spread or (1.0,), random.Random(name)
        limits = Limits.of(config, max_prefill_rows=_PREFILL_ROWS, padded=False)
        self.places = config.max_queue + config.max_requests
        limits = dataclasses.replace(limits, max_queue=self.places)
        pool = PagePool(config.device_pages)
        self._arrived = Arrived()
        tier = self._arrived if role == "decode" else None
        self._cache = PrefixCache(pool, config.page_size, b"simulated", host_tier=tier) if config.prefix_cache else None
        self.scheduler: Scheduler = Scheduler(limits, pool, cache=self._cache, policy=config.policy, seed=0)
        self.inside = 0
        self.routed = 0
        self.busy = 0.0
        self._running: StepPlan | None = None
        self._next: StepPlan | None = None  # planned while `_running` runs

    def take(self, request: Request) -> None:
        """Take in a request whose prompt another replica has computed, with the prompt's pages."""
        cache, tokens = self._cache, request.token_ids
        if cache is not None:
            nodes = cache.graft_path(tokens[: len(tokens) // cache.page_size * cache.page_size]) or []
            self._arrived.digests.update(cache.digest_of(node) for node in nodes if not node.page)
        self.scheduler.submit(request)

    def wake(self) -> float | None:
        """Begin a step if none runs; return its seconds, or None."""
        if self._running is not None:
            return None
        self._running = self.scheduler.plan()
        return self._begin()

    def _begin(self) -> float | None:
        if self._running is None:
            return None
        self._next = self.scheduler.plan()
        seconds = self._cost.seconds(StepWork.of(self._running)) * self._draw.choice(self._spread)
        self.busy += seconds
        return seconds

    def end_step(self) -> tuple[list[tuple[str, int, bool]], float | None]:
        """End the step; return its requests' tokens and whether they ended, and the seconds of the next step."""
        plan = self._running
        assert plan is not None, "no step was running"
        rows = tuple(RowResult(row.request.id, row.epoch, _TOKEN if row.samples else None) for row in plan.rows)
        events = self.scheduler.commit(StepResult(plan, rows))
        deltas = [(event.request_id, len(event.token_ids), event.finish_reason is not None) for event in events]
        self.inside -= sum(ended for _, _, ended in deltas)
        self._running = self._next if self._next is not None else self.scheduler.plan()
        self._next = None
        return deltas, self._begin()


class Outcome(NamedTuple):
    """The result of a simulation, or of a real run in the same terms. Times in seconds."""

    requests: int
    refused: int  # because no place was free
    seconds: float
    hit_rate: float  # share of the prompt tokens that were cached
    imbalance: float  # requests of the busiest replica, in proportion to the mean
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
    """Collects the arrival times of tokens."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.between: list[float] = []
        self.tokens = 0
        self._last: dict[str, float] = {}
        self._submit_times: dict[str, float] = {}

    def submitted(self, name: str, at: float) -> None:
        self._submit_times[name] = at

    def received(self, name: str, tokens: int, at: float, *, ended: bool) -> None:
        if tokens:
            if name not in self._last:
                self.first.append(at - self._submit_times[name])
            else:
                self.between += [(at - self._last[name]) / tokens] * tokens
            self._last[name] = at
            self.tokens += tokens
        if ended:
            self._last.pop(name, None)
            del self._submit_times[name]


def simulate(
    asks: Sequence[SimulatedRequest],
    config: EngineConfig,
    cost: StepCost,
    *,
    replicas: int | None = None,
    router: str | Router = "affinity",
    roles: Mapping[Literal["prefill", "decode"], int] | None = None,
    move: float = 0.0,
    watch: Watch | None = None,
    spread: Sequence[float] = (),
) -> Outcome:
    """Run a load on `replicas` replicas, one by default. With `roles`, each prompt token takes `move` s to a replica
    that decodes. `watch` decides which tokens count; it knows requests by their place in `asks`. `spread` has equally
    likely factors for the times that `cost` gives."""
    active_router = router_named(router) if isinstance(router, str) else router
    replica_roles = roles_of(roles, 1 if roles is None and replicas is None else replicas)
    fleet = {
        f"r{number}": Replica(f"r{number}", config, cost, role, spread) for number, role in enumerate(replica_roles)
    }
    prefill, decode = ([member for member in fleet.values() if member.role != role] for role in ("decode", "prefill"))
    handoffs: dict[str, tuple[SimulatedRequest, Request]] = {}  # requests whose prompt is computed for another replica
    order = itertools.count()
    queue: list[tuple[float, int, SimulatedRequest | Replica | str]] = [
        (ask.at + cost.request, next(order), ask) for ask in asks
    ]
    heapq.heapify(queue)
    watch, refused, now = watch or Watch(), 0, 0.0
    longest = config.max_model_len or 1 << 30

    def begin(replica: Replica, seconds: float | None) -> None:
        if seconds is not None:
            heapq.heappush(queue, (now + seconds, next(order), replica))

    def assign(ask: SimulatedRequest, among: Sequence[Replica]) -> Replica | None:
        loads = [Load(member.name, member.inside, member.places) for member in among]
        route = active_router.choose(Keys(ask.opening, ask.conversation), loads)
        if route is None:
            return None
        replica = fleet[route.name]
        replica.inside += 1
        replica.routed += 1
        return replica

    while queue:
        now, number, event = heapq.heappop(queue)
        if isinstance(event, Replica):
            deltas, seconds = event.end_step()
            for name, tokens, ended in deltas:
                goes_on = ended and event.role == "prefill" and name in handoffs
                watch.received(name, tokens, now, ended=ended and not goes_on)
                if goes_on:
                    later = now + move * handoffs[name][1].prompt_length
                    heapq.heappush(queue, (later, next(order), name))
            begin(event, seconds)
            continue
        if isinstance(event, str):
            ask, request = handoffs.pop(event)
            replica = assign(ask, decode) or min(decode, key=lambda one: one.inside)
            replica.take(dataclasses.replace(request, resumed=Resumed(np.array([_TOKEN], np.int32))))
            begin(replica, replica.wake())
            continue
        name = str(number)
        sampling = Sampling(max_tokens=event.output, ignore_eos=True, seed=0)
        request = Request(name, event.tokens(), sampling)
        split = roles is not None and goes_two_ways(request, longest)
        target = assign(event, prefill if split else decode) if event.length + event.output <= longest else None
        if target is None:
            refused += 1
            continue
        watch.submitted(name, event.at)
        if split:
            handoffs[name] = event, request
        target.scheduler.submit(prompt_only(request) if split else request)
        begin(target, target.wake())
    figures = [member.scheduler.statistics() for member in (fleet.values() if roles is None else prefill)]
    prompts = sum(member.prompt_tokens for member in figures)
    counts = [member.routed for member in fleet.values()]
    seconds = now - asks[0].at if asks else 0.0
    return Outcome(
        requests=sum(counts) - (sum(member.routed for member in prefill) if roles is not None else 0),
        refused=refused,
        seconds=seconds,
        hit_rate=sum(member.cached_tokens for member in figures) / prompts if prompts else 0.0,
        imbalance=max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0,
        busy=sum(member.busy for member in fleet.values()) / (seconds * len(fleet)) if seconds else 0.0,
        first_token=(percentile(watch.first, 0.5), percentile(watch.first, 0.99)),
        between=(percentile(watch.between, 0.5), percentile(watch.between, 0.99)),
        tokens_per_second=watch.tokens / seconds if seconds else 0.0,
    )
