"""Scheduler and runner together under a random load: every finished output is the plain loop's, nothing compiles."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import plain_sampling
from helpers.counting import make_scoring_programs
from helpers.driving import plain_tokens, tiny_config, tiny_model
from helpers.fakes import DictTier
from helpers.scheduling import NoReserve
from helpers.thorough import by_default
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import FinishReason, Request, TokenEvent
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.engine import Engine
from rekindle._src.execution.runner import Runner
from rekindle._src.kvcache import PagePool, PrefixCache, root_digest
from rekindle._src.programs import sampling as device
from rekindle._src.programs.buckets import prefill_rows
from rekindle._src.programs.demand import Demand, StepPrograms
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.repeated import MOST_STEPS
from rekindle._src.programs.row_option import drawing_flags
from rekindle._src.programs.warming import warm
from rekindle._src.scheduling.scheduler import Limits, Scheduler

MODEL = tiny_model(seed=3)
VOCAB = MODEL.config.vocab_size
MARGIN = 1e-3  # a smaller distance between the best two is a tie, which rounding may decide either way


class Turns:
    """The engine of a session, without its tasks, and the events of each request."""

    def __init__(self, config: EngineConfig, programs: Programs, tier: DictTier, repeated: int = 1) -> None:
        assert config.device_pages is not None
        assert config.page_size is not None
        self.pool = PagePool(config.device_pages)
        self.cache = PrefixCache(self.pool, config.page_size, root_digest("exact"), host_tier=tier)
        most = prefill_rows(config.max_tokens_per_step, config.max_requests)
        limits = Limits.of(config, max_prefill_rows=most, padded=False)
        limits = dataclasses.replace(limits, repeated_steps=repeated, repeated_seconds=math.inf)
        demand = StepPrograms(programs, Demand(programs)) if repeated > 1 else None
        self.scheduler = Scheduler(limits, self.pool, cache=self.cache, reserve=NoReserve(), programs=demand)
        self.runner = Runner(MODEL, config, programs=programs, host_tier=tier)
        self.engine = Engine(self.scheduler, self.runner)
        self.events: dict[str, list[TokenEvent]] = {}

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.events[request.id] = []

    def abort(self, request: Request) -> None:
        event = self.scheduler.abort(request.id)
        if event is not None:
            self.events[request.id].append(event)

    def turn(self) -> bool:
        events = self.engine.turn()
        for event in events or ():
            if event.error is not None:
                raise event.error
            self.events[event.request_id].append(event)
        return events is not None

    def output(self, request: Request) -> list[int]:
        return [token for event in self.events[request.id] for token in event.token_ids]

    def reason(self, request: Request) -> FinishReason | None:
        return self.events[request.id][-1].finish_reason


@functools.cache
def _chooser() -> jax.stages.Wrapped:
    return jax.jit(device.choose)


class Plain:
    """Chooses as a request asks, from the plain loop's logits; remembers where rounding could have decided."""

    def __init__(self, request: Request) -> None:
        self.request, self.ties = request, []
        self.noise = np.random.default_rng(0).normal(0, MARGIN / 10, (8, VOCAB)).astype(np.float32)
        self.noise[0] = 0

    def __call__(self, logits: np.ndarray, output: list[int]) -> int:
        sampling, prompt = self.request.sampling, self.request.token_ids.tolist()
        shaped = plain_sampling.shaped(logits, sampling, prompt, output, self.request.eos_ids)
        if sampling.greedy:
            second, first = np.sort(shaped)[-2:]
            self.ties.append(bool(first - second < MARGIN))
            return int(np.argmax(shaped))
        rows = shaped.astype(np.float32) + self.noise
        repeat = functools.partial(np.full, 8)
        seed = sampling.seed or 0
        choice = device.Choice(
            *(jnp.array(repeat(value), dtype) for value, dtype in (
                (sampling.temperature, jnp.float32), (sampling.top_k, jnp.int32), (sampling.top_p, jnp.float32),
                (sampling.min_p, jnp.float32),
            )),
            seed=jnp.tile(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32), (8, 1)),
            position=jnp.full(8, len(prompt) + len(output), jnp.int32),
        )  # fmt: skip
        tokens = np.asarray(_chooser()(rows, choice, jnp.int32(drawing_flags(sampling))))
        self.ties.append(len(set(tokens.tolist())) > 1)
        return int(tokens[0])


def random_request(
    index: int, rng: np.random.Generator, stems: list[np.ndarray], longest: int, *, few: bool
) -> Request:
    stem = stems[rng.integers(len(stems))]
    tail = rng.integers(3, VOCAB, rng.integers(1, 12))
    prompt = np.concatenate([stem[: rng.integers(0, len(stem) + 1)], tail])[: longest - 2].astype(np.int32)
    options: dict[str, object] = {"max_tokens": int(rng.integers(1, 14)), "seed": int(rng.integers(0, 2**63))}
    if rng.random() < 0.3:
        options |= {"temperature": float(rng.choice([0.5, 1.0])), "top_k": int(rng.choice([0, 8, 100]))}
        options |= {"top_p": float(rng.choice([1.0, 0.8])), "min_p": float(rng.choice([0.0, 0.05]))}
    if rng.random() < 0.3:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        options["logit_bias"] = {int(rng.integers(VOCAB)): 2.0, int(rng.integers(VOCAB)): -50.0}
    if rng.random() < 0.2:
        options["min_tokens"] = int(rng.integers(0, options["max_tokens"] + 1))  # type: ignore[operator]
    if rng.random() < 0.3:
        options["logprobs"] = int(rng.integers(0, 4))
    if rng.random() < 0.2:
        options["prompt_logprobs"] = int(rng.integers(0, 4))
    ends = frozenset(rng.integers(3, VOCAB, 25).tolist()) if rng.random() < 0.4 else frozenset[int]()
    if few and rng.random() < 0.5:  # of few tokens, so that the text repeats itself
        prompt, options["logit_bias"] = prompt % 2 + 10, dict.fromkeys((10, 11), 9.0)
        options["max_tokens"] = int(rng.integers(10, 40))
        options["min_tokens"] = 0
    return Request(f"q{index}", prompt, Sampling(**options), eos_ids=ends)  # type: ignore[arg-type]


@dataclasses.dataclass
class Tally:
    finished: int = 0
    aborted: int = 0
    ties: int = 0
    reasons: set[FinishReason] = dataclasses.field(default_factory=set)


def compare(engine: Turns, request: Request, longest: int, tally: Tally) -> None:
    found, reason = engine.output(request), engine.reason(request)
    assert reason is not None, f"{request.id} never ended"
    tally.reasons.add(reason)
    limit = min(request.sampling.max_tokens, longest - request.prompt_length)
    plain = Plain(request)
    expected, _ = plain_tokens(MODEL, request.token_ids.tolist(), limit, plain)
    ended = [i for i, token in enumerate(expected) if token in request.eos_ids and i >= request.sampling.min_tokens]
    whole = expected[: ended[0] + 1] if ended else expected
    for index, (mine, theirs) in enumerate(zip(found, whole, strict=False)):
        if mine != theirs:
            assert plain.ties[index], f"{request}: token {index} is {mine}, the plain loop's {theirs}"
            tally.ties += 1
            return
    if reason is FinishReason.ABORTED:
        tally.aborted += 1
        assert len(found) <= len(whole)
        return
    tally.finished += 1
    assert len(found) == len(whole), (request, found, whole)
    assert (reason is FinishReason.EOS) == bool(ended)


SETUPS = {
    "pages of 8, four at once, few pages": {"page_size": 8, "device_pages": 17, "max_tokens_per_step": 32},
    "pages of 16, two at once, short chunks": {
        "page_size": 16, "device_pages": 7, "max_tokens_per_step": 8, "max_requests": 2,
    },
    "steps repeated on the device": {"page_size": 8, "device_pages": 18, "max_tokens_per_step": 32},
    "guesses in every row that is free": {
        "page_size": 8, "device_pages": 20, "max_tokens_per_step": 24, "prompt_lookup": 3,
    },
    "guesses from all texts": {
        "page_size": 8, "device_pages": 20, "max_tokens_per_step": 24, "prompt_lookup": 3, "drafts": "suffix",
    },
}  # fmt: skip


@pytest.mark.parametrize("setup", by_default(SETUPS, lambda setup: "two at once" in setup or "repeated" in setup))
def test_two_hundred_requests_equal_the_plain_loop_and_compile_nothing(setup: str) -> None:
    config, tier, rng = tiny_config(**SETUPS[setup]), DictTier(limit=40), np.random.default_rng(7)
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, config)
    warm(programs)
    make_scoring_programs(programs)
    counts = programs.counts.traces, programs.counts.compilations
    engine = Turns(config, programs, tier, MOST_STEPS if "repeated" in setup else 1)
    longest = config.max_model_len or 0
    stems = [rng.integers(3, VOCAB, length) for length in (20, 33, 55)]
    requests: list[Request] = []
    while len(requests) < 100 or engine.scheduler.has_work:
        if len(requests) < 100 and rng.random() < 0.3:
            for _ in range(rng.integers(1, 4)):
                requests.append(random_request(len(requests), rng, stems, longest, few=config.prompt_lookup > 0))
                engine.submit(requests[-1])
        if requests and rng.random() < 0.03:
            engine.abort(requests[-int(rng.integers(1, min(len(requests), 8) + 1))])
        engine.turn()
    engine.scheduler.check_integrity()
    assert (programs.counts.traces, programs.counts.compilations) == counts
    statistics, runner = engine.scheduler.statistics(), engine.runner.statistics()
    engine.runner.close()

    tally = Tally()
    for request in requests:
        compare(engine, request, longest, tally)
    print(f"\n{setup}: {tally}\n{statistics}\n{runner}")
    assert tally.finished > 70
    assert tally.aborted > 0
    assert tally.ties < 5
    assert tally.reasons >= {FinishReason.EOS, FinishReason.LENGTH, FinishReason.CONTEXT, FinishReason.ABORTED}
    assert statistics.preemptions > 0
    assert runner.pages_in > 0
    assert runner.pages_out > 0
    if config.prompt_lookup:
        assert 10 < statistics.accepted_tokens < statistics.drafted_tokens
