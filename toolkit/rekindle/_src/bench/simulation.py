"""A fleet in simulated time: the real scheduler, prefix cache and routers over steps with modelled durations.

Each replica has the engine and the prefix cache of a session; only the device is replaced, by `StepCost`. As in a
session, a step is planned while the one before it runs, so a request that arrives meanwhile waits for the next one.

A step's cost is a linear function of its work, fitted to the steps of a real session. Steps of one size vary with the
machine's other work: half of them take less time than the function says. The spread has the ratios, from which a
simulation draws. Loads are synthetic, or read from a recorded trace.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Unpack

import anyio
import numpy as np

from rekindle._src.core.config import OpenOptions, ResolvedConfig
from rekindle._src.core.contracts import InFlightLike
from rekindle._src.core.records import IntArray, Request, ResumeState, RowResult, StepPlan, StepResult
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import LoopTurn
from rekindle._src.dispatch.engine import Engine
from rekindle._src.kvcache.pool import PagePool
from rekindle._src.kvcache.tree import PrefixCache
from rekindle._src.replicas.routing import AffinityKeys, Load, Role, Router, goes_two_ways, prompt_only, roles_of
from rekindle._src.replicas.routing import router as router_named
from rekindle._src.scheduling.scheduler import Scheduler
from rekindle._src.scheduling.sequence import Limits
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.session.session import Session

_PREFILL_ROWS = 8
_TOKEN = 7  # any id: the text does not matter


class MovedPages:
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


class SimulatedDevice:
    """A runner without a device: every row that samples gives the same token."""

    programs = None

    def dispatch(self, plan: StepPlan) -> StepResult:
        rows = tuple(RowResult(row.request.id, row.epoch, _TOKEN if row.samples else None) for row in plan.rows)
        return StepResult(plan, rows)

    def fetch(self, in_flight: InFlightLike) -> StepResult:
        assert isinstance(in_flight, StepResult), "a step of this device"
        return in_flight

    def program(self, plan: StepPlan) -> str:
        return "simulated"

    def read_side(self, side: int, slots: Sequence[int]) -> NoReturn:
        raise NotImplementedError("simulated models have no side caches")

    def read_pages(self, pages: Sequence[int], digests: Sequence[bytes] = ()) -> NoReturn:
        raise AssertionError("a simulated page has no content")

    def statistics(self) -> NoReturn:
        raise AssertionError("a simulated device counts nothing")

    def close(self) -> None: ...


class SimulatedReplica:
    """One replica: an engine, and the times of the steps on its device."""

    def __init__(
        self, name: str, config: ResolvedConfig, cost: StepCost, role: Role = "both", spread: Sequence[float] = ()
    ) -> None:
        self.name, self._cost, self.role = name, cost, role
        self._spread, self._draw = spread or (1.0,), random.Random(name)
        limits = Limits.of(config, max_prefill_rows=_PREFILL_ROWS, padded=False)
        self.places = config.max_queue + config.max_requests
        limits = dataclasses.replace(limits, max_queue=self.places)
        pool = PagePool(config.device_pages)
        self._arrived = MovedPages()
        tier = self._arrived if role == "decode" else None
        self._cache = PrefixCache(pool, config.page_size, b"simulated", host_tier=tier) if config.prefix_cache else None
        self.scheduler: Scheduler = Scheduler(limits, pool, cache=self._cache, policy=config.policy, seed=0)
        self._engine = Engine(self.scheduler, SimulatedDevice(), config)
        self._turn: LoopTurn | None = None  # ends with the step that runs
        self.inside = 0
        self.routed = 0
        self.busy = 0.0

    def take(self, request: Request) -> None:
        """Take in a request with the pages of its prompt, which another replica has computed."""
        cache, tokens = self._cache, request.token_ids
        if cache is not None:
            nodes = cache.graft(tokens[: len(tokens) // cache.page_size * cache.page_size]) or []
            self._arrived.digests.update(cache.digest_of(node) for node in nodes if not node.page)
        self.scheduler.submit(request)

    def wake(self) -> float | None:
        """Begin a step if none runs; return its seconds, or None."""
        return self._begin() if self._turn is None else None

    def _begin(self) -> float | None:
        while (turn := self._engine.begin()) is not None:
            step = self._engine.awaited(turn)
            if step is not None:
                self._turn = turn
                seconds = self._cost.seconds(StepWork.of(step)) * self._draw.choice(self._spread)
                self.busy += seconds
                return seconds
            self._engine.end(self._engine.advance(turn))  # it dispatches the first step, and waits for none
        return None

    def end_step(self) -> tuple[list[tuple[str, int, bool]], float | None]:
        """End the step; return its requests' tokens and whether they ended, and the seconds of the next step."""
        turn, self._turn = self._turn, None
        assert turn is not None, "no step was running"
        self._engine.end(self._engine.advance(turn))
        batch = self._engine.events()
        events = () if batch is None else batch.events
        deltas = [(event.request_id, len(event.token_ids), event.finish_reason is not None) for event in events]
        self.inside -= sum(ended for _, _, ended in deltas)
        return deltas, self._begin()


class SimulationOutcome(NamedTuple):
    """The result of a simulation, or of a real run in the same terms. Times in seconds."""

    requests: int
    refused: int  # because no place was free
    seconds: float
    hit_rate: float  # share of the prompt tokens that were cached
    imbalance: float  # requests of the busiest replica, in proportion to the mean
    busy: float  # share of the time that devices ran steps
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
    config: ResolvedConfig,
    cost: StepCost,
    *,
    replicas: int | None = None,
    router: str | Router = "affinity",
    roles: Mapping[Literal["prefill", "decode"], int] | None = None,
    move: float = 0.0,
    watch: Watch | None = None,
    spread: Sequence[float] = (),
) -> SimulationOutcome:
    """Run a load on `replicas` replicas, one by default. With `roles`, each prompt token takes `move` s to a replica
    that decodes. `watch` decides which tokens count; it knows requests by their place in `asks`. `spread` has equally
    likely factors for the times that `cost` gives."""
    active_router = router_named(router) if isinstance(router, str) else router
    replica_roles = roles_of(roles, 1 if roles is None and replicas is None else replicas)
    members = [SimulatedReplica(f"r{number}", config, cost, role, spread) for number, role in enumerate(replica_roles)]
    fleet = {member.name: member for member in members}
    prefill, decode = ([member for member in fleet.values() if member.role != role] for role in ("decode", "prefill"))
    handoffs: dict[str, tuple[SimulatedRequest, Request]] = {}  # requests with a prompt computed for another replica
    order = itertools.count()
    queue: list[tuple[float, int, SimulatedRequest | SimulatedReplica | str]] = [
        (ask.at + cost.request, next(order), ask) for ask in asks
    ]
    heapq.heapify(queue)
    watch, refused, now = watch or Watch(), 0, 0.0
    longest = config.max_model_len or 1 << 30

    def begin(replica: SimulatedReplica, seconds: float | None) -> None:
        if seconds is not None:
            heapq.heappush(queue, (now + seconds, next(order), replica))

    def assign(ask: SimulatedRequest, among: Sequence[SimulatedReplica]) -> SimulatedReplica | None:
        loads = [Load(member.name, member.inside, member.places) for member in among]
        route = active_router.choose(AffinityKeys(ask.opening, ask.conversation), loads)
        if route is None:
            return None
        replica = fleet[route.name]
        replica.inside += 1
        replica.routed += 1
        return replica

    while queue:
        now, number, event = heapq.heappop(queue)
        if isinstance(event, SimulatedReplica):
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
            replica.take(dataclasses.replace(request, resumed=ResumeState(np.array([_TOKEN], np.int32))))
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
    return SimulationOutcome(
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


_ROUNDS = 12  # of reweighting, after which the fit no longer changes
_SURE = 0.02  # smaller relative errors count as equal


class StepWork(NamedTuple):
    rows: int  # decoding ones
    prefill: int  # tokens of prompts
    context: int  # positions that the rows attend to
    chunks: int = 0  # prompts of these tokens

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        return cls(len(plan.decode), plan.prefill_tokens, sum(row.start for row in plan.rows), len(plan.prefill))


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, and of its parts."""

    step: float
    row: float
    prefill: float  # of a prompt's token
    context: float  # of a position attended to
    chunk: float = 0.0  # of each prompt in the step, however short its part
    request: float = 0.0  # of a request in addition to its steps: from the caller to the first step, and back

    def seconds(self, work: StepWork) -> float:
        of_prompts = self.prefill * work.prefill + self.chunk * work.chunks
        return self.step + self.row * work.rows + of_prompts + self.context * work.context

    @classmethod
    def fit(cls, steps: Sequence[tuple[StepWork, float]]) -> StepCost:
        """Return the cost that half of the measured steps of any size stay below; no part is negative."""
        if not steps:
            raise ValueError("no steps were measured")
        features = np.array([(1, *work) for work, _ in steps], np.float64)
        seconds = np.maximum(np.array([duration for _, duration in steps], np.float64), 1e-7)
        # Relative errors count: a step of decode rows is as important as a prefill of 512 tokens. Their absolute values
        # are minimised, not their squares, by weighing each step with its error in the round before: steps that shared
        # their time with other work would draw a mean away from the usual time.
        predicted, weights = seconds, np.ones(len(steps))
        coefficients = np.zeros(5)
        for _ in range(_ROUNDS):
            scale = weights / predicted
            coefficients = _nonnegative(features * scale[:, None], seconds * scale)
            predicted = np.maximum(features @ coefficients, 1e-7)
            weights = 1 / np.sqrt(np.maximum(np.abs(seconds / predicted - 1), _SURE))
        return cls(*coefficients.tolist())

    def spread(self, steps: Sequence[tuple[StepWork, float]], points: int = 100) -> tuple[float, ...]:
        """Return quantiles, in order, of the measured times of steps over the times that this cost gives."""
        ratios = [seconds / max(self.seconds(work), 1e-7) for work, seconds in steps]
        return tuple(np.quantile(ratios, (np.arange(points) + 0.5) / points).tolist())


def _nonnegative(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return least squares without negative coefficients; these are left out, the most negative first."""
    columns = list(range(matrix.shape[1]))
    while True:
        solution = np.linalg.lstsq(matrix[:, columns], values, rcond=None)[0]
        if not len(solution) or solution.min() >= 0:
            result = np.zeros(matrix.shape[1])
            result[columns] = solution
            return result
        del columns[int(solution.argmin())]


class StepTimes:
    """An observer of a session: the work of its steps, and the seconds from the step before to each.

    The host's work between two steps is included. A step that had to wait for requests counts with its device time
    alone.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self._last: tuple[float, frozenset[str]] = (0.0, frozenset())

    def __call__(self, result: StepResult) -> None:
        now, requests = time.perf_counter(), frozenset(row.request.id for row in result.plan.rows)
        at, before = self._last
        continued = not before.isdisjoint(requests)
        self.steps.append((StepWork.of(result.plan), now - at if continued else result.device_seconds))
        self._last = now, requests


VOCABULARY = 50_000
Text = tuple[tuple[int, int], ...]  # a prompt in blocks: a name for the block's content, and its tokens


class SimulatedRequest(NamedTuple):
    at: float  # seconds
    prompt: Text
    output: int  # tokens
    opening: bytes  # names its system prompt
    conversation: bytes

    @property
    def length(self) -> int:
        return sum(size for _, size in self.prompt)

    def tokens(self) -> IntArray:
        """Return the token ids; equal blocks have equal ids."""
        return np.concatenate([_block(name, size) for name, size in self.prompt]).astype(np.int32)


def _block(name: int, size: int) -> np.ndarray:
    return np.random.default_rng(name).integers(1, VOCABULARY, size)


def chats(
    draw: random.Random,
    requests: int,
    rate: float,
    *,
    systems: int = 8,
    system_tokens: int = 512,
    turns: int = 4,
    question: int = 60,
    output: int = 80,
    pause: float = 4.0,
) -> list[SimulatedRequest]:
    """Return conversations under shared system prompts: each turn repeats the text before it, after a reading pause.

    Few system prompts are much more popular than the others. Sizes are means.
    """
    asks: list[SimulatedRequest] = []
    names = iter(range(1, 1 << 62))
    openings = [((next(names), _about(draw, system_tokens)),) for _ in range(systems)]
    at, number = 0.0, 0
    while len(asks) < requests:
        at += draw.expovariate(rate / turns)
        index = min(systems - 1, int(systems ** draw.random()) - 1)
        text: Text = openings[index]
        now, number = at, number + 1
        for _ in range(max(1, round(draw.gauss(turns, 1)))):
            text = (*text, (next(names), _about(draw, question)))
            answer = _about(draw, output)
            asks.append(SimulatedRequest(now, text, answer, b"s%d" % index, b"c%d" % number))
            text = (*text, (next(names), answer))
            now += draw.expovariate(1 / pause) + 0.02 * answer
    return sorted(asks[:requests])


def questions(draw: random.Random, requests: int, rate: float) -> list[SimulatedRequest]:
    """Return requests with shared system prompts, each followed by one question."""
    return chats(draw, requests, rate, systems=24, system_tokens=768, turns=1)


def floods(draw: random.Random, requests: int, rate: float) -> list[SimulatedRequest]:
    """Return chats, and among them long prompts that are new to every cache."""
    short = chats(draw, requests - requests // 10, rate)
    last = short[-1].at
    long = []
    for number in range(requests // 10):
        at, prompt, name = draw.uniform(0, last), ((1 << 62 | 1 + number, _about(draw, 3000)),), b"f%d" % number
        long.append(SimulatedRequest(at, prompt, 32, name, name))
    return sorted([*short, *long])


LOADS: dict[str, Callable[[random.Random, int, float], list[SimulatedRequest]]] = {
    "chats": chats, "questions": questions, "floods": floods,
}  # fmt: skip


def _about(draw: random.Random, mean: int) -> int:
    return max(4, min(4 * mean, round(draw.lognormvariate(0.0, 0.4) * mean)))


def read_trace(path: Path) -> list[SimulatedRequest]:
    """Return a trace in the format of Mooncake: an object on each line, with `timestamp` in milliseconds and tokens in
    `input_length` and `output_length`. `hash_ids` name the prompt's blocks, all of one size except the last."""
    asks = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            names = [int(name) for name in entry["hash_ids"]]
            length, output = int(entry["input_length"]), int(entry["output_length"])
            if not names or min(names) < 0 or length < 1 or output < 1:
                raise ValueError("a request has at least one block, one token of prompt and one of output")
            size = -(-length // len(names))
            sizes = [max(1, min(size, length - at * size)) for at in range(len(names))]
            opening = b"%d" % names[0]
            conversation = b"%d" % names[min(1, len(names) - 1)]
            prompt = tuple(zip(names, sizes, strict=True))
            asks.append(SimulatedRequest(float(entry["timestamp"]) / 1e3, prompt, output, opening, conversation))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"line {number} is no request: {error!r}"
            raise ConfigError("trace", str(path), problem, "See `rekindle simulate --help` for the format") from None
    if not asks:
        raise ConfigError("trace", str(path), "has no requests", "Pass a file with a JSON object on each line")
    return sorted(asks)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


CHATS = 120  # requests of the chats
BUSY = 0.15  # approximate share of the time that they keep the device busy
OUTPUT = 24  # tokens


class SessionPace(NamedTuple):
    """The pace of an open session on this machine."""

    cost: StepCost
    spread: tuple[float, ...]  # see `StepCost.spread`


def measure_model(model: str, **options: Unpack[OpenOptions]) -> SessionPace:
    from rekindle._src.session.opening import open_sync  # with JAX, which a simulation does without

    pace: OpenOptions = {"quiet": True, "disk_memory": 0, **options}
    with open_sync(model, **pace) as session:
        return measure(session)


def measure(session: Session, *, seed: int = 0) -> SessionPace:
    """Return the pace of an open session. The first round only compiles.

    A request's cost in addition to its steps is the extra time of chats' first tokens over a
    simulation of the steps alone: a request among others waits for more than the device.
    """
    from rekindle._src.session.session import client_of

    draw, client = random.Random(seed), client_of(session)
    times, batches = StepTimes(), StepTimes()
    for observer in (None, batches):
        if observer is not None:
            client.observe(observer)
        for rows in (1, 2, 4, 8, session.config.max_requests):
            prompts = [_prompt(draw, session) for _ in range(rows)]
            anyio.run(_stream, session, prompts)
        session.cache.clear().result_sync()
    client.unobserve(batches)
    asks = _chats(draw, session, StepCost.fit(_usable(batches)))
    for watched in (False, True):
        if watched:
            client.observe(times)
        watch, _ = anyio.run(replay, session, asks)
        session.cache.clear().result_sync()
    client.unobserve(times)
    steps = _usable(times)
    cost = StepCost.fit([*steps, *_usable(batches)])
    simulated = simulate(asks, session.config, cost, spread=cost.spread(steps))
    overhead = max(0.0, percentile(watch.first, 0.5) - simulated.first_token[0])
    return SessionPace(dataclasses.replace(cost, request=overhead), cost.spread(steps))


async def replay(target: Any, asks: Sequence[SimulatedRequest], watch: Watch | None = None) -> tuple[Watch, float]:
    """Send requests when they are due and read every delta as it arrives, as clients do.

    Returns the arrival times of tokens, and the seconds of the whole run.
    """
    watch, vocabulary, began = watch or Watch(), target.tokenizer.vocab_size, time.perf_counter()

    async def stream_one(number: int, ask: SimulatedRequest) -> None:
        prompt = (ask.tokens() % vocabulary).tolist()
        await anyio.sleep(max(0.0, began + ask.at - asks[0].at - time.perf_counter()))
        name = str(number)
        watch.submitted(name, time.perf_counter())
        async for delta in target.stream(prompt, max_tokens=ask.output, ignore_eos=True):
            if delta.token_ids:
                watch.received(name, len(delta.token_ids), time.perf_counter(), ended=False)

    async with anyio.create_task_group() as group:
        for number, ask in enumerate(asks):
            group.start_soon(stream_one, number, ask)
    return watch, time.perf_counter() - began


def _usable(times: StepTimes) -> list[tuple[StepWork, float]]:
    return [(work, seconds) for work, seconds in times.steps if seconds > 0]


def _chats(draw: random.Random, session: Session, cost: StepCost) -> list[SimulatedRequest]:
    """Return chats that fit into the session's context, at a rate that keeps the device busy now and then."""
    longest = _longest(session)
    question = max(2, longest // 40)
    seconds = cost.seconds(StepWork(0, 2 * question, 0, 1)) + OUTPUT * cost.seconds(StepWork(1, 0, longest // 4))
    asks = chats(
        draw,
        CHATS,
        BUSY / seconds,
        systems=6,
        system_tokens=max(4, longest // 6),
        turns=3,
        question=question,
        output=OUTPUT,
        pause=10 * seconds,
    )
    return [ask for ask in asks if ask.length + ask.output < longest]


async def _stream(session: Session, prompts: Sequence[Sequence[int]]) -> None:
    async def read(prompt: Sequence[int]) -> None:
        async for _ in session.stream(prompt, max_tokens=OUTPUT, ignore_eos=True):
            pass

    async with anyio.create_task_group() as group:
        for prompt in prompts:
            group.start_soon(read, prompt)


def _longest(session: Session) -> int:
    longest = session.config.max_model_len
    return min(1024, longest)


def _prompt(draw: random.Random, session: Session) -> list[int]:
    size = min(_longest(session) - 32, int(2 ** draw.uniform(4, 10)))
    return [draw.randrange(1, session.tokenizer.vocab_size) for _ in range(max(1, size))]
