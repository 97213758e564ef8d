"""Gates and norms next to a product follow its implementation."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from helpers import checkpoints
from helpers.driving import tiny_config
from helpers.thorough import by_default
from rekindle._src.models.base import graph_of
from rekindle._src.models.config import MoeSpec
from rekindle._src.models.nn.linear import Linear
from rekindle._src.models.nn.moe import Experts
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.programs import Programs
from rekindle_kernels.native import build

APART = {"write_float32", "convolution", "scan"}  # kernels of pages and states
# Wide enough for native gates.
WIDE = {"intermediate_size": 64, "moe_intermediate_size": 64, "hidden_size_per_layer_input": 64}


@pytest.mark.skipif(build.unavailable_reason() is not None, reason="there are no native kernels")
def test_the_gate_behind_a_bias_is_xlas_where_products_are() -> None:
    def lowered(implementation: str | None) -> str:
        layer = Linear(128, 64, Precision(implementation=implementation), bias=True)
        layer.weight.set_value(jnp.ones((128, 64)))
        layer.bias.set_value(jnp.ones(128))
        return str(jax.jit(lambda x: layer(x, gate="gelu_tanh")).lower(jnp.ones((2, 64))).as_text())

    assert "rekindle_gatedrows" in lowered(None)
    assert "rekindle" not in lowered("xla")


@pytest.mark.skipif(build.unavailable_reason() is not None, reason="there are no native kernels")
@pytest.mark.parametrize(
    ("bias", "adapted"), by_default([(False, True), (True, False), (False, False), (True, True)], 3)
)
def test_the_gates_of_experts_are_xlas_where_their_products_are(bias: bool, adapted: bool) -> None:
    config = config_from_hf(checkpoints.CASES["llama"])
    spec = MoeSpec(num_experts=2, top_k=1, intermediate_size=64, normalize=True, bias=bias)

    def lowered(implementation: str | None) -> str:
        precision = Precision("float32", implementation=implementation, loop_experts=True)
        graph, state = nnx.split(Experts(config, spec, precision))
        module = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), state))

        def compute(rows: jax.Array, sizes: jax.Array) -> jax.Array:
            if not adapted:
                return module.loop(rows, sizes)
            return module.activated(module.product(module.gate_up, rows, sizes))  # adapters are added between them

        rows = jax.ShapeDtypeStruct((4, config.hidden_size), jnp.float32)
        return str(jax.jit(compute).lower(rows, jax.ShapeDtypeStruct((2,), jnp.int32)).as_text())

    assert ("rekindle_gatedrows" in lowered(None)) == (bias or adapted), "else the gate is a part of the product"
    assert "rekindle" not in lowered("xla")


@pytest.mark.skipif(build.unavailable_reason() is not None, reason="there are no native kernels")
@pytest.mark.parametrize("case", by_default(["falcon-h1", "gemma4-shared-pages-and-embeddings-of-layers"]))
def test_gates_and_norms_of_a_model_are_xlas_where_its_products_are(case: str) -> None:
    config = config_from_hf(checkpoints.CASES[case] | WIDE)

    def called(implementation: str | None) -> set[str]:
        precision = dataclasses.replace(Precision.of(jnp.float32, None), implementation=implementation)
        programs = Programs(config, *graph_of(config, precision), tiny_config(kernels="xla", structured=False))
        lowered = str(programs.compiler.build(programs.lattice.ahead[0]).as_text())
        return set(re.findall(r"@rekindle_(\w+)", lowered)) - APART

    assert called(None)
    assert not called("xla")
