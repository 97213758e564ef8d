"""A model whose heads have sinks: every text is the plain loop's, whatever is batched, cached, preempted and forked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from workshop import reference

anyio_test = pytest.mark.anyio
MODEL = checkpoints.case("gpt-oss")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 256, "page_size": 16,
    "cache_dir": None, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
PROMPTS = [np.random.default_rng(count).integers(3, 160, count).tolist() for count in (5, 24, 70, 130)]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def plain(prompt: list[int], count: int = 24) -> list[int]:
    return reference.generate(MODEL, prompt, count)


def test_sinks_decide() -> None:
    """Without them the plain loop, which the others are compared with, would say something else."""
    leaves = [leaf - 50 if path.endswith("sinks") else leaf
              for path, leaf in zip(MODEL.graph.paths, MODEL.leaves, strict=True)]  # fmt: skip
    room = reference.empty_cache(MODEL, 24)
    without = dataclasses.replace(MODEL, leaves=tuple(leaves))
    logits, others = (np.asarray(reference.prefill(model, PROMPTS[1], room)[0]) for model in (MODEL, without))
    assert np.abs(logits - others).max() > 0.1 * logits.std()


@anyio_test
async def test_texts_are_those_of_the_plain_loop(anyio_backend: str) -> None:
    async with rekindle.open(MODEL, **OPTIONS) as session:
        many = await session.generate(PROMPTS, **GREEDY)
        assert [list(done.token_ids) for done in many] == [plain(prompt) for prompt in PROMPTS]
        again = await session.generate(PROMPTS[3], **GREEDY)
        assert list(again.token_ids) == plain(PROMPTS[3])
        assert again.usage.cached_tokens > 100
        source = session.submit(PROMPTS[1], **GREEDY)
        await source
        forked = await session.fork(source, at=7, **GREEDY)
        assert list(forked.token_ids)[:17] == plain(PROMPTS[1])[7:]


@anyio_test
async def test_preempted_requests_go_on(anyio_backend: str) -> None:
    async with rekindle.open(MODEL, **{**OPTIONS, "device_pages": 22}) as session:
        many = await session.generate(PROMPTS, **{**GREEDY, "max_tokens": 80})
        assert [list(done.token_ids) for done in many] == [plain(prompt, 80) for prompt in PROMPTS]
        assert session.stats().preemptions > 0, "there was room for all of them"


def test_the_kernels_of_xla_agree() -> None:
    with rekindle.open_sync(MODEL, kernels="xla", **OPTIONS) as session:
        many = session.generate_sync(PROMPTS[:3], **GREEDY)
        assert [list(done.token_ids) for done in many] == [plain(prompt) for prompt in PROMPTS[:3]]
