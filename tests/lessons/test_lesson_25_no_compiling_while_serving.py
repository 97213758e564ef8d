"""Once the programs of the lattice are ready nothing is traced or compiled, whatever is asked for.

Programs that score prompts are made before, as a session's first scores do.

Upstream: https://github.com/vllm-project/vllm/pull/14510
The logits processor compiled again after warm-up.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.counting import COMPILING, compiled_by_jax, counts, make_scoring_programs
from helpers.sessions import engine_of
from helpers.small import CONTEXT, LEAST, PAGE, VOCAB, opening, plain, prompt
from rekindle import Session

OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"prompt_logprobs": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0.7, "top_k": 200, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "logprobs": 3, "prompt_logprobs": 2, "temperature": 1.0},
    {"logit_bias": {5: 3.0, 6: -100.0}},
    {"min_tokens": 3, "stop_token_ids": tuple(range(10, 26))},
    {"n": 3, "temperature": 1.0, "top_p": 0.5},
    {"processors": "least"},
    {"processors": "least", "frequency_penalty": 1.0, "logprobs": 1},
]


async def whole_lattice(session: Session) -> None:
    """Run steps of all sizes: 0 to 4 decoding rows with 0 to all tokens of prefill, hits and misses, every option."""
    seeds = itertools.count()
    for rows in range(5):
        for tokens in (0, 1, 2, PAGE, 15, 16, 17, 31, 32, CONTEXT - 1):
            options = OPTIONS[next(seeds) % len(OPTIONS)]
            running = [session.submit(prompt(next(seeds), 2), max_tokens=6, ignore_eos=True) for _ in range(rows)]
            for handle in running:
                async for _ in handle:
                    break
            if tokens:
                ids = prompt(next(seeds), tokens, shared=min(tokens // 2, 2 * PAGE))
                await session.generate([ids] * (1 + rows % 2), max_tokens=3, **options)
            for handle in running:
                await handle
    for first, second in itertools.product(OPTIONS, OPTIONS[:4] + OPTIONS[-2:]):
        handles = [session.submit(prompt(next(seeds), 5), max_tokens=4, **options) for options in (first, second)]
        for handle in handles:
            await handle


async def odd_sizes(session: Session) -> None:
    """A random load with cancellations, that moves pages to host memory and back."""
    random = np.random.default_rng(1)
    for _ in range(12):
        handles = []
        for _ in range(int(random.integers(1, 9))):
            ids = prompt(int(random.integers(12)), int(random.integers(32, CONTEXT)), shared=int(random.integers(32)))
            options = OPTIONS[random.integers(len(OPTIONS))]
            handles.append(session.submit(ids, max_tokens=int(random.integers(3, 20)), ignore_eos=True, **options))
        for handle in handles[::4]:
            handle.cancel()
        for index, handle in enumerate(handles):
            if index % 4:
                await handle


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_lesson_25_nothing_compiles_over_the_whole_lattice_with_every_option() -> None:
    want = plain(prompt(0, 5), 4)  # compiled before it counts
    async with opening(processors=[LEAST], host_memory=1 << 20) as session:
        programs = engine_of(session).runner.programs
        names = {bucket.name for bucket in programs.lattice.ahead}
        scoring = {bucket.name for bucket in make_scoring_programs(programs)}
        warm = counts(session)
        with compiled_by_jax() as events:
            for _ in range(4):  # on a busy machine rows may end before a prompt meets them
                await whole_lattice(session)
                if {name for name, steps in session.programs().steps.items() if steps} >= names:
                    break
            await odd_sizes(session)
            assert (await session.generate(prompt(0, 5), max_tokens=4)).token_ids == want
            assert max(want) < VOCAB
        assert counts(session) == warm
        assert events == []
        ran = session.programs().steps
        stats = session.stats()
        run = {name for name, steps in ran.items() if steps}
        assert names <= run <= names | scoring, "the load does not cover the lattice"
        assert run & scoring, "no prompt was scored"
        assert stats.pages_out > 0 and stats.pages_in > 0, "no page left the device and came back"
        session.check_integrity()


@pytest.mark.slow
@pytest.mark.anyio
async def test_lesson_25_the_counters_see_a_program_that_compiles_while_serving(tmp_path: Path) -> None:
    """What the test above relies on; nothing is stored yet."""
    async with opening(precompile="lazy", cache_dir=str(tmp_path)) as session:
        before = counts(session)
        with compiled_by_jax() as events:
            await session.generate(prompt(1, 3), max_tokens=1)
        assert counts(session) > before
        assert set(events) == set(COMPILING)
