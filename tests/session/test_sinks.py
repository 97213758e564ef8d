"""A model whose heads have sinks: every text is the plain loop's, whatever is batched, cached, preempted and forked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from rekindle import Session
from workshop import reference

MODEL = checkpoints.case("gpt-oss")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 256, "page_size": 16,
    "precompile": "lazy", "seed": 0, "quiet": True, "disk_memory": 0,
}  # fmt: skip
PROMPTS = [np.random.default_rng(count).integers(3, 160, count).tolist() for count in (5, 24, 70, 130)]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def plain(prompt: list[int], count: int = 24) -> list[int]:
    return plain_loop(MODEL, prompt, count, context=256)


def test_sinks_decide() -> None:
    """Without them the plain loop, which the others are compared with, would say something else."""
    leaves = [leaf - 50 if path.endswith("sinks") else leaf
              for path, leaf in zip(MODEL.graph.paths, MODEL.leaves, strict=True)]  # fmt: skip
    room = reference.empty_cache(MODEL, 24)
    without = dataclasses.replace(MODEL, leaves=tuple(leaves))
    logits, others = (np.asarray(reference.prefill(model, PROMPTS[1], room)[0]) for model in (MODEL, without))
    assert np.abs(logits - others).max() > 0.1 * logits.std()


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """One for all tests, most of whose time is compiling; the longer texts are too much for it."""
    with rekindle.open_sync(MODEL, **OPTIONS, device_pages=22) as session:
        yield session


def test_texts_are_those_of_the_plain_loop(session: Session) -> None:
    many = session.generate_sync(PROMPTS, **GREEDY)
    assert [list(done.token_ids) for done in many] == [plain(prompt) for prompt in PROMPTS]
    again = session.generate_sync(PROMPTS[3], **GREEDY)
    assert list(again.token_ids) == plain(PROMPTS[3])
    assert again.usage.cached_tokens > 100

    async def fork() -> None:
        source = session.submit(PROMPTS[1], **GREEDY)
        await source
        forked = await session.fork(source, at=7, **GREEDY)
        assert list(forked.token_ids)[:17] == plain(PROMPTS[1])[7:]

    anyio.run(fork)


def test_preempted_requests_go_on(session: Session) -> None:
    many = session.generate_sync(PROMPTS, **{**GREEDY, "max_tokens": 80})
    assert [list(done.token_ids) for done in many] == [plain(prompt, 80) for prompt in PROMPTS]
    assert session.stats().preemptions > 0, "there was room for all of them"


def test_the_kernels_of_xla_agree() -> None:
    with rekindle.open_sync(MODEL, kernels="xla", **OPTIONS) as session:
        many = session.generate_sync(PROMPTS[:3], **GREEDY)
        assert [list(done.token_ids) for done in many] == [plain(prompt) for prompt in PROMPTS[:3]]
