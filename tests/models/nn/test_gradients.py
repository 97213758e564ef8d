"""A model that runs on native kernels can be differentiated: its gradient is the plain form's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rekindle._src.models.nn.forward import RopeTables
from rekindle._src.models.nn.linear import Linear, RMSNorm
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import config_from_hf
from rekindle_kernels import unavailable_reason

RAW = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


@pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
@pytest.mark.parametrize("rows", [2, 40])
def test_gradients_go_through_the_plain_form(rows: int) -> None:
    config, random = config_from_hf(RAW), np.random.default_rng(0)
    x, weight = random.standard_normal((rows, 64), np.float32), random.standard_normal((256, 64), np.float32)

    def gradients(implementation: str | None) -> tuple[jax.Array, ...]:
        precision = dataclasses.replace(Precision.of("float32", platform="cpu"), implementation=implementation)

        def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
            norm, head_norm, project, down = (
                RMSNorm(64, 1e-5, precision),
                RMSNorm((3, 64), 1e-5, precision),
                Linear(256, 64, precision),
                Linear(64, 128, precision),
            )
            norm.weight, project.weight = nnx.Param(jnp.ones(64)), nnx.Param(weight)
            head_norm.weight = nnx.Param(weight[:3] + 1)
            down.weight = nnx.Param(weight[:128].T)
            wide = project(norm(x))
            heads = RopeTables(config, jnp.arange(rows)).split(
                *[wide.reshape(rows, 4, 64)] * 2, 2, config.attention[0].rope, head_norm, implementation=implementation
            )
            out = down(project(x, norm=norm, gate="silu"), residual=x)
            return (out * out[::-1]).sum() + sum((part * part[::-1]).sum() for part in heads)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight)

    for got, want in zip(gradients(None), gradients("xla"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(np.abs(want).max()))
