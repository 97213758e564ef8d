"""Log-probabilities of rollouts compared with those that a trainer differentiates: to the bit, or as near as stated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rekindle
from helpers import checkpoints
from helpers.small import MODEL, OPTIONS, prompt
from rekindle import RolloutBatch, Session
from rekindle._src.models.base import LoadedModel
from rekindle.errors import InvalidRequest
from rekindle_kernels import unavailable_reason

native = pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="no native kernels")
QUESTIONS = ["Once upon a time there was", "The cat", "Tom and Anna saw a bird in the tree. It was a"]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    options: dict[str, Any] = {"max_requests": 8, "max_model_len": 64, "precompile": "lazy", "quiet": True}
    with rekindle.open_sync("tiny", dtype="float32", deterministic=True, disk_memory=0, seed=0, **options) as made:
        yield made


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return rekindle.models.load(rekindle.tiny.folder(), dtype="float32")


def drawn(session: Session) -> RolloutBatch:
    # More sequences than run at once, which join and leave while others run; the second time with cached prompts.
    batch = session.rollout_sync(QUESTIONS, n=4, max_tokens=12, seed=3, pad_to=40)
    assert int(batch.completion_mask.sum()) > 60
    return batch


@pytest.mark.thorough
@native
def test_a_deterministic_session_has_the_trainers_bits(session: Session, model: LoadedModel) -> None:
    logprobs = jax.jit(rekindle.models.logprobs_like(session))
    params = nnx.state(rekindle.models.merge(model.graph, model.leaves), nnx.Param)
    for _ in range(2):
        batch = drawn(session)
        own = np.asarray(logprobs(params, batch.tokens))
        inside = batch.completion_mask
        assert own[inside].tolist() == batch.logprobs[inside].tolist()
    changed = jax.tree.map(lambda leaf: leaf * 1.001, params)
    assert (np.asarray(logprobs(changed, batch.tokens))[inside] != batch.logprobs[inside]).mean() > 0.9


EXACT: dict[str, dict[str, Any]] = {
    "gemma4-values-of-keys": {"head_dim": 32, "global_head_dim": 64},
    "gemma4-shared-pages-and-embeddings-of-layers": {
        "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 32,
    },
    "qwen3": {"head_dim": 32},
    "qwen3.5": {"head_dim": 64, "num_hidden_layers": 2, "full_attention_interval": 2},
}  # fmt: skip


@native
@pytest.mark.thorough
@pytest.mark.parametrize("name", EXACT)
def test_so_has_one_with_a_small_vocabulary_soft_caps_and_states(name: str) -> None:
    """XLA adds the exponentials of few tokens in orders that depend on how many places there are."""
    raw = checkpoints.CASES[name] | {"hidden_size": 64} | EXACT[name]
    model = checkpoints.model(raw, checkpoints.tensors(raw))
    with rekindle.open_sync(model, **OPTIONS | {"precompile": "lazy", "deterministic": True}) as session:
        prompts = [[token % model.config.vocab_size for token in prompt(seed, 9)] for seed in range(3)]
        batch = session.rollout_sync(prompts, n=2, max_tokens=12, pad_to=24, seed=1)
        params = nnx.state(rekindle.models.merge(model.graph, model.leaves), nnx.Param)
        own = np.asarray(jax.jit(rekindle.models.logprobs_like(session))(params, batch.tokens))
    inside = batch.completion_mask
    assert inside.sum() == 72 and own[inside].tolist() == batch.logprobs[inside].tolist()


@native
@pytest.mark.slow
def test_its_ratio_is_one_and_its_gradient_the_plain_forms(session: Session, model: LoadedModel) -> None:
    exact = rekindle.models.logprobs_like(session)
    graph, params = nnx.split(rekindle.models.merge(model.graph, model.leaves))
    batch = drawn(session)
    tokens, mask, old = batch.tokens, batch.completion_mask, batch.logprobs
    weights = np.linspace(-1, 1, len(batch), dtype=np.float32)[:, None] * mask

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        ratio = jnp.exp(jnp.where(mask, exact(params, tokens) - old, 0.0))
        return (ratio * weights).sum(), ratio

    def plain(params: Any) -> jax.Array:
        return (rekindle.models.token_logprobs(nnx.merge(graph, params), tokens) * weights).sum()

    gradient, ratio = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert (np.asarray(ratio) == 1.0).all()
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(jax.jit(jax.grad(plain))(params)), strict=True):
        assert float(jnp.abs(other).max()) > 0
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.abs(other).max()))


@pytest.mark.thorough
def test_other_sessions_are_refused() -> None:
    with rekindle.open_sync(MODEL, **OPTIONS | {"precompile": "lazy", "dtype": "auto"}) as session:
        assert session.config.dtype == session.config.kv_dtype == "float32", "those of the loaded model"
        with pytest.raises(InvalidRequest, match="deterministic=True"):
            rekindle.models.logprobs_like(session)
        with pytest.raises(InvalidRequest, match="two axes"):
            rekindle.models.token_logprobs(MODEL, [1, 2, 3])
        batch = session.rollout_sync([prompt(1, 11), prompt(2, 5)], n=2, max_tokens=10, pad_to=24)
        own = np.asarray(rekindle.models.token_logprobs(MODEL, batch.tokens))
        assert not own[:, 0].any() and np.abs(own - batch.logprobs)[batch.completion_mask].max() < 2e-4


FAMILIES = (
    "qwen3", "gemma3", "gpt2", "mistral-window", "qwen3-moe", "gpt-oss", "lfm2", "deepseek-v2",
    "gemma4-shared-pages-and-embeddings-of-layers",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_near(family: str, tmp_path: Path, record_property: Any) -> None:
    """The largest difference is a property of the test's report."""
    model = checkpoints.case(family)
    with rekindle.open_sync(model, **OPTIONS | {"precompile": "lazy", "cache_dir": str(tmp_path)}) as session:
        prompts = [[token % model.config.vocab_size for token in prompt(seed, 9)] for seed in range(3)]
        batch = session.rollout_sync(prompts, n=2, max_tokens=12, pad_to=24, seed=1)
        own = np.asarray(rekindle.models.token_logprobs(model, batch.tokens))
        largest = float(np.abs(own - batch.logprobs)[batch.completion_mask].max())
        record_property("largest", largest)
        assert largest < 1e-4
