"""Random loads: whatever is shared, evicted, offloaded, preempted or aborted, every output is the plain loop's."""

from __future__ import annotations

import random

import pytest

from helpers.fakes import DictTier, EchoModel, FakeModel, make_request
from helpers.scheduling import LoopBuilder, NoReserve
from helpers.thorough import by_default
from rekindle._src.core.config import POLICIES
from rekindle._src.core.records import Request


@pytest.mark.parametrize("seed", by_default(range(24), 5))
def test_a_random_load_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    page_size = draw.choice([2, 4, 8])
    model = EchoModel if seed % 3 == 2 else FakeModel
    loop = (
        LoopBuilder(
            pages=draw.choice([14, 20, 40, 200]),
            page_size=page_size,
            max_requests=draw.choice([2, 4, 8]),
            max_tokens_per_step=draw.choice([8, 16, 48]),
            max_prefill_rows=draw.choice([1, 2, 8]),
            overlap=draw.random() < 0.7,
            model=model(eos_rate=draw.choice([0.0, 0.05]), alphabet=tuple(range(6))),
        )
        .drafts(lookup=5 if seed % 3 == 2 else 0, source="suffix" if seed % 3 == 2 and seed % 2 else "auto")
        .cache(prefixes=seed % 6 != 5, host_tier=draw.choice([None, DictTier(20), DictTier()]))
        .queue(policy=draw.choice(POLICIES), seed=seed, max_overtakes=3, reserve=draw.choice([None, NoReserve()]))
        .loop()
    )
    texts = [[draw.randrange(6) for _ in range(60)] for _ in range(4)]
    longest = min(50, (loop.pool.total - 1) * page_size)
    done: list[Request] = []
    aborted: set[str] = set()
    for _ in range(40):
        for _ in range(draw.choice([0, 0, 1, 1, 3])):
            if done and draw.random() < 0.3:  # a chat that goes on: everything it has seen so far, and a bit
                before = draw.choice(done)
                prompt = [*before.token_ids.tolist(), *loop.output(before), draw.randrange(6)][:longest]
            else:
                prompt = (draw.choice(texts)[: draw.randint(1, 60)] + [draw.randrange(6)] * draw.randint(0, 3))[
                    :longest
                ]
            for index in range(draw.choice([1, 1, 1, 3])):
                request = make_request(
                    prompt, max_tokens=draw.randint(1, 40), temperature=draw.choice([0.0, 1.0]), seed=index
                )
                loop.submit(request)
                done.append(request)
        for _ in range(draw.randint(0, 8)):
            loop.step()
        if done and draw.random() < 0.1:
            victim = draw.choice(done)
            event = loop.scheduler.abort(victim.id)
            loop.take(event)
            if event is not None:
                aborted.add(victim.id)
        loop.scheduler.check_integrity()
    loop.run()
    assert loop.pool.held == 0
    statistics = loop.scheduler.statistics()
    assert (0 < statistics.accepted_tokens <= statistics.drafted_tokens) == (model is EchoModel)
    for request in done:
        output = loop.output(request)
        plain = loop.model.generate(request)
        whole = min(len(plain), loop.pool.total * page_size + 1 - request.prompt_length)
        assert output == plain[: len(output) if request.id in aborted else whole], f"{request.id} of load {seed}"
