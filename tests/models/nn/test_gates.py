"""Gates that a layer applies behind its product follow the product's implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from rekindle._src.models.nn.linear import Linear
from rekindle._src.models.precision import Precision
from rekindle_kernels.native import build


@pytest.mark.skipif(build.unavailable_reason() is not None, reason="there are no native kernels")
def test_the_gate_behind_a_bias_is_xlas_where_products_are() -> None:
    def lowered(implementation: str | None) -> str:
        layer = Linear(128, 64, Precision(implementation=implementation), bias=True)
        layer.weight.set_value(jnp.ones((128, 64)))
        layer.bias.set_value(jnp.ones(128))
        return str(jax.jit(lambda x: layer(x, gate="gelu_tanh")).lower(jnp.ones((2, 64))).as_text())

    assert "rekindle_gatedrows" in lowered(None)
    assert "rekindle" not in lowered("xla")
