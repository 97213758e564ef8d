"""Attention in blocks of queries compared with attention at once: results and derivatives."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rekindle._src.models import blocked_attention
from rekindle._src.models.blocked_attention import BlockedAttention, blocks_of
from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.plain import PlainAttention
from rekindle.tiny import folder

LENGTH, ROWS, HEADS, KV_HEADS, SIZE, VALUE_SIZE = 41, 2, 6, 2, 8, 5
SPECS = {
    "causal": AttentionSpec(scale=0.3),
    "window": AttentionSpec(scale=0.3, sliding_window=11),
    "capped": AttentionSpec(scale=1.5, soft_cap=2.0),
    "both ways": AttentionSpec(scale=0.3, causal=False),
    "sinks": AttentionSpec(scale=0.3, sinks=True),
}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load(folder()).config


@pytest.mark.parametrize("name", SPECS)
def test_results_and_derivatives_are_those_of_attention_at_once(
    name: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_attention, "BLOCK", 16)
    spec, rng = SPECS[name], np.random.default_rng(0)
    sizes = (HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, VALUE_SIZE)
    heads = [jnp.asarray(rng.normal(size=(ROWS * LENGTH, *size)), jnp.float32) for size in sizes]
    sinks = jnp.asarray(rng.normal(size=HEADS), jnp.float32) if spec.sinks else None
    weights = jnp.asarray(rng.normal(size=(ROWS * LENGTH, HEADS, VALUE_SIZE)), jnp.float32)
    module: Any = types.SimpleNamespace(config=config)

    def value(kind: type[PlainAttention], operands: Any) -> Any:
        q, k, v, sinks = operands
        out = kind(module, LENGTH, ROWS).attention(q, k, v, spec, sinks)
        return jnp.sum(out * weights), out

    found, right = (
        jax.value_and_grad(lambda operands, kind=kind: value(kind, operands), has_aux=True)((*heads, sinks))
        for kind in (BlockedAttention, PlainAttention)
    )
    ((_, out), changes), ((_, expected), derivatives) = found, right
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for change, derivative in zip(jax.tree.leaves(changes), jax.tree.leaves(derivatives), strict=True):
        assert np.abs(derivative).max() > 0.01
        np.testing.assert_allclose(change, derivative, rtol=1e-4, atol=2e-5)


def test_a_block_reads_the_keys_that_its_queries_see() -> None:
    window = AttentionSpec(scale=1.0, sliding_window=100)
    assert [block.keys for block in blocks_of(AttentionSpec(scale=1.0), 300)] == [
        slice(0, 128), slice(0, 256), slice(0, 300)
    ]  # fmt: skip
    assert [block.keys for block in blocks_of(window, 300)] == [slice(0, 128), slice(29, 256), slice(157, 300)]
    assert len(blocks_of(window, 100_000)) == blocked_attention.COMPILED_BLOCKS, "each of them is compiled"
