"""Deterministic sessions of models with states, and others: a text has the same bits however its tokens came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.thorough import by_default
from rekindle import Completion
from rekindle._src.core.config import EngineConfig
from rekindle._src.opening.resolve import reason_against
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle.errors import ConfigError
from rekindle_kernels import unavailable_reason

native = pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="no native kernels")
# Sizes of whole vectors, which native kernels take, where a case has others.
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SIZES: dict[str, dict[str, Any]] = {
    # 16 numbers are rotated, and in layers of EXAONE 4 none: norms of heads are not a part of a native rotation then.
    "qwen3.5": {"head_dim": 64, "num_hidden_layers": 2, "full_attention_interval": 2},
    "exaone4": {"head_dim": 32},
    "lfm2": TWO_HEADS,
    "lfm3": {"head_dim": 32},
    "falcon-h1": {"head_dim": 32},
    "falcon-h1-norm-behind-gate": {"head_dim": 32, "mamba_d_ssm": 192, "mamba_d_head": 32, "mamba_d_state": 16},
    "falcon-h1-norm-before-gate": {"head_dim": 32, "mamba_d_ssm": 192, "mamba_d_head": 32, "mamba_d_state": 16},
    "granite4": {**TWO_HEADS, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_heads": 4},
    "nemotron-h": {"head_dim": 32, "mamba_head_dim": 32, "ssm_state_size": 16},
    # Layers with windows of 8, whose pages are given back, along with layers that see everything; and layers with
    # embeddings of their own, and with the pages of other layers.
    "gemma4-values-of-keys": {"head_dim": 32, "global_head_dim": 64},
    "gemma4-shared-pages-and-embeddings-of-layers": {
        "head_dim": 32,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 32,
    },
}
QUICK = ("qwen3.5", "falcon-h1", "gemma4-values-of-keys")
NAMES = [*by_default(QUICK), *(pytest.param(name, marks=pytest.mark.slow) for name in SIZES if name not in QUICK)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 256, "page_size": 16,
    "device_pages": 28, "precompile": "lazy", "seed": 0, "quiet": True, "disk_memory": 0, "deterministic": True,
}  # fmt: skip
PROMPTS = [np.random.default_rng(count).integers(3, 160, count).tolist() for count in (5, 24, 70, 130)]
DRAWN: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "ignore_eos": True, "seed": 5, "logprobs": 0}


def bits(completions: Sequence[Completion]) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities."""
    return [[(one.token_id, one.logprob) for one in done.logprobs] for done in completions]


@pytest.mark.thorough
@native
@pytest.mark.timeout(600)
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # arithmetic: the loop has no say in it
@pytest.mark.parametrize("name", NAMES)
async def test_a_text_has_the_same_bits_alone_beside_others_cut_cached_and_preempted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = checkpoints.CASES[name] | {"hidden_size": 64} | SIZES[name]
    model = checkpoints.model(raw, checkpoints.tensors(raw))
    async with rekindle.open(model, **OPTIONS) as session:

        async def each(prompts: list[list[int]], **options: Any) -> list[Completion]:
            """Every prompt alone and cold, in steps that end at multiples of 64."""
            results = []
            for prompt in prompts:
                await session.cache.clear(tier="memory")
                results.append(await session.generate(prompt, **options))
            assert not any(done.usage.cached_tokens for done in results)
            return results

        first = await session.generate(PROMPTS[2], **{**DRAWN, "max_tokens": 90})
        longer = [*PROMPTS[2], *first.token_ids]
        cached = await session.generate(longer, **DRAWN)  # after a state that was left while the text was generated
        assert cached.usage.cached_tokens >= 128
        prompts = [*PROMPTS[:2], longer, PROMPTS[3]]
        alone = await each(prompts, **DRAWN)
        await session.cache.clear(tier="memory")
        together = await session.generate(prompts, **DRAWN)  # each prompt is cut where the others' rows leave room
        again = await session.generate(longer, **DRAWN)  # after a state that was left in a prompt
        assert again.usage.cached_tokens >= 128 and session.stats().preemptions == 0
        assert bits([cached, again, *together]) == bits([alone[2], alone[2], *alone])
        long = await each(prompts, **{**DRAWN, "max_tokens": 80})
        many = await session.generate(prompts, **{**DRAWN, "max_tokens": 80})
        assert session.stats().preemptions > 0, "there was room for all of them"
        assert bits(many) == bits(long)
        trained = rekindle.models.logprobs_like(session)(model, np.asarray([[*longer, *cached.token_ids]]))
        drawn = [one.logprob for one in cached.logprobs]
        np.testing.assert_allclose(np.asarray(trained)[0, len(longer) :], drawn, rtol=1e-6)
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    async with rekindle.open(model, **OPTIONS, drafts="suffix") as session:
        for _ in range(2):  # the second time each text is drafted from the first
            assert bits(await session.generate(prompts, **{**DRAWN, "max_tokens": 80})) == bits(long)
        assert bits(await session.generate(prompts[1:2], **DRAWN)) == bits(alone[1:2])
        assert session.stats().accepted_tokens > 80


REFUSED = [
    ("qwen3.5-tied-biases", {"hidden_size": 64}, "states of 8 x 12 with 80 channels are not whole vectors"),
    ("granite4", {"hidden_size": 64, "mamba_n_heads": 8}, "states of 12 x 16 with"),
    ("qwen3.5-moe", {}, "experts are multiplied"),
]


@native
@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_why_not(name: str, changes: dict[str, Any], words: str) -> None:
    raw = checkpoints.CASES[name] | changes
    assert words in (reason_against(rekindle.models.config_from_hf(raw), EngineConfig()) or "")


@native
@pytest.mark.anyio
async def test_states_that_xla_computes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"deterministic=True: can't be kept: states of 8 x 12.*Leave it out"):
        async with rekindle.open(checkpoints.case("qwen3.5-tied-biases"), **OPTIONS):
            pass
