"""Programs that were loaded give the tokens of programs that were just compiled, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.counting import BUILT, compiled_by_jax, counts
from helpers.small import CONTEXT, VOCAB, opening
from rekindle import Session

Answer = tuple[Any, ...]


def load(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Random prompts with random options; a third of them begin alike."""
    random = np.random.default_rng(4)
    stem = random.integers(3, VOCAB, 30).tolist()
    requests = []
    for seed in range(count):
        start = stem[: random.integers(8, 31)] if seed % 3 == 0 else []
        ids = start + random.integers(3, VOCAB, random.integers(1, CONTEXT - 8 - len(start))).tolist()
        options: dict[str, Any] = {"max_tokens": int(random.integers(2, 9)), "ignore_eos": True, "seed": seed}
        if random.random() < 0.5:
            options |= {
                "temperature": 1.0,
                "top_p": float(random.choice([0.7, 1.0])),
                "top_k": int(random.choice([0, 9])),
            }
        if random.random() < 0.3:
            options |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}}
        if random.random() < 0.3:
            options |= {"logprobs": 3, "prompt_logprobs": 1}
        requests.append((ids, options))
    return requests


def answers(session: Session, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[Answer]:
    """Tokens and log-probabilities, bit by bit; one request after another, so that both sides run the same steps."""
    found = []
    for at in range(0, len(requests), 4):
        with session.paused():
            handles = [session.submit(ids, **options) for ids, options in requests[at : at + 4]]
        done = [handle.result_sync() for handle in handles]
        found += [(one.token_ids, one.logprobs, one.prompt_logprobs) for one in done]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "at_once"), [(60, 2), pytest.param(1000, 4, marks=pytest.mark.slow)])
def test_loaded_programs_give_exactly_what_compiled_ones_do(count: int, at_once: int, tmp_path: Path) -> None:
    requests = load(count)
    with opening(cache_dir=str(tmp_path), max_requests=at_once).result_sync() as session:
        assert {program.origin for program in session.programs()} == {"compiled"}
        fresh = answers(session, requests)
    with opening(cache_dir=str(tmp_path), max_requests=at_once).result_sync() as session:
        assert {program.origin for program in session.programs()} == {"loaded"}
        assert counts(session) == (0, 0)
        loaded = answers(session, requests)
        session.check_integrity()
    assert len(fresh) == len(loaded) == count
    assert loaded == fresh


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_a_warm_store_warms_in_the_background_and_compiles_nothing_until_the_hundredth_request() -> None:
    async with opening():
        pass  # its programs are in the store now
    with compiled_by_jax() as events:
        async with opening(precompile="background") as session:
            for at in range(0, 100, 10):
                handles = [session.submit(ids, **options) for ids, options in load(100)[at : at + 10]]
                for handle in handles:
                    await handle
            assert counts(session) == (0, 0)
    assert BUILT not in events
