"""Experts: the loop that CPUs run and the grouped product that accelerators run, against one token at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.config import MoeSpec
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.nn.forward import ForwardPass, RopeTables
from rekindle._src.models.nn.linear import quantise
from rekindle._src.models.nn.moe import Experts, block_rows
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import config_from_hf
from rekindle._src.opening.weights import replace_weights
from rekindle_kernels import int4

E, INNER, G, K = 32, 24, 5, 2
CONFIG = config_from_hf(
    {"model_type": "llama", "vocab_size": 8, "hidden_size": E, "num_hidden_layers": 1, "num_attention_heads": 2,
     "intermediate_size": INNER}
)  # fmt: skip
SPEC = MoeSpec(num_experts=G, top_k=K, intermediate_size=INNER, normalize=True)
STEP = ForwardPass(RopeTables.of({}), lambda *_: pytest.fail("experts attend to nothing"))


def experts(precision: Precision, seed: int = 0) -> Experts:
    module = Experts(CONFIG, SPEC, precision)
    quantise(module, precision)
    graph, state = nnx.split(module)
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-127, 128, leaf.shape, np.int8))
        if len(leaf.shape) == 2 and leaf.shape[-1] != E:  # a scale
            return jnp.full(leaf.shape, 2e-3, jnp.float32)
        values = jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * 0.2)
        if leaf.dtype == jnp.uint16:
            return jax.lax.bitcast_convert_type(values.astype(precision.weights), jnp.uint16)
        return values.astype(leaf.dtype)

    return nnx.merge(graph, jax.tree.map(fill, state))


def one_by_one(module: Experts, x: jax.Array) -> np.ndarray:
    """float32 arithmetic on the stored values, each token with its own experts."""

    def values(stack: nnx.Module) -> np.ndarray:
        weight = stack.weight[...]
        if stack.values is not None:
            weight = jax.lax.bitcast_convert_type(weight, jnp.dtype(stack.values))
        wide = np.asarray(weight.astype(jnp.float32))
        return wide if stack.scale is None else wide * np.asarray(stack.scale[...])[..., None]

    gate_up, down = values(module.gate_up), values(module.down)
    weights, chosen = (np.asarray(a) for a in module.route(x))
    out = np.zeros(x.shape, np.float32)
    for token, row in enumerate(np.asarray(x)):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = np.split(gate_up[expert] @ row, 2)
            out[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize(
    ("looped", "dtype", "quantize", "tolerance"),
    by_default([
        (True, "float32", None, 1e-5), (False, "bfloat16", None, 2e-2), (False, "float32", "int8", 4e-2),
        (True, "bfloat16", "int8-weight", 2e-2),
        (False, "float32", None, 1e-5), (True, "bfloat16", None, 2e-2), (True, "float32", "int8", 4e-2),
        (False, "bfloat16", "int8-weight", 2e-2),
    ], 3),
)  # fmt: skip
@pytest.mark.parametrize("tokens", by_default([7, 1, 40]))
def test_each_token_gets_its_own_experts(
    looped: bool, dtype: str, quantize: str | None, tolerance: float, tokens: int
) -> None:
    module = experts(Precision(dtype, quantize, loop_experts=looped))
    x = jnp.asarray(np.random.default_rng(tokens).standard_normal((tokens, E), np.float32))
    expected = one_by_one(module, x)
    got = np.asarray(jax.jit(lambda x: module(x, STEP))(x))
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype", by_default(["bfloat16", "float32"]))
def test_the_loop_never_touches_an_expert_that_nobody_chose(dtype: str) -> None:
    module = experts(Precision(dtype, loop_experts=True))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, E), np.float32))
    _, chosen = module.route(x)
    idle = [expert for expert in range(G) if expert not in np.asarray(chosen)]
    poison = 0x7FC0 if dtype == "bfloat16" else np.nan  # a NaN's bits
    module.down.weight[...] = module.down.weight[...].at[np.array(idle)].set(poison)
    assert np.isfinite(np.asarray(jax.jit(lambda x: module(x, STEP))(x))).all()


def test_all_tokens_may_choose_the_same_experts() -> None:
    module = experts(Precision(loop_experts=True))
    x = jnp.broadcast_to(jnp.asarray(np.random.default_rng(2).standard_normal(E), jnp.float32), (33, E))
    got = np.asarray(jax.jit(lambda x: module(x, STEP))(x))
    np.testing.assert_allclose(got, one_by_one(module, x), rtol=1e-4, atol=1e-4)


def test_blocks_follow_the_share_of_an_expert() -> None:
    assert [block_rows(rows, 8) for rows in (2, 16, 64, 512, 4096)] == [2, 4, 16, 64, 64]


def test_sixteen_bit_experts_are_loaded_and_replaced_as_bits(tmp_path: Path) -> None:
    raw = checkpoints.CASES["mixtral"]
    state = checkpoints.tensors(raw)
    loaded = load(checkpoints.write(tmp_path, raw, state, dtype="bfloat16"), dtype="bfloat16")
    leaves = dict(zip(loaded.graph.paths, loaded.leaves, strict=True))
    stack = leaves["layers.1.mlp.down.weight"]
    assert stack.dtype == jnp.uint16, "floats of 16 bits would be widened as a whole in every step"
    values = jax.lax.bitcast_convert_type(stack, jnp.bfloat16)
    stored = np.stack([state[f"model.layers.1.block_sparse_moe.experts.{n}.w2.weight"] for n in range(4)])
    np.testing.assert_array_equal(np.asarray(values), stored.astype(jnp.bfloat16))
    given = leaves | {"layers.1.mlp.down.weight": values * 2}
    replaced = dict(zip(loaded.graph.paths, replace_weights(loaded, given).leaves, strict=True))
    doubled = jax.lax.bitcast_convert_type(replaced["layers.1.mlp.down.weight"], jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(doubled), np.asarray(values) * 2)


@pytest.mark.thorough
@pytest.mark.parametrize("looped", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts_of_four_bits_are_those_of_their_values(looped: bool, tokens: int) -> None:
    config = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=32)
    spec = dataclasses.replace(SPEC, intermediate_size=32)
    precision = Precision("float32", "int4", loop_experts=looped)
    module = Experts(config, spec, precision)
    quantise(module, precision)
    graph, state = nnx.split(module)
    rng = np.random.default_rng(3)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.uint8:
            return jnp.asarray(rng.integers(0, 256, leaf.shape).astype(np.uint8))
        if leaf.dtype == jnp.float16:
            return jnp.asarray(rng.random(leaf.shape).astype(np.float16) / 20)
        return jnp.asarray(rng.standard_normal(leaf.shape).astype(leaf.dtype) * 0.2)

    module = nnx.merge(graph, jax.tree.map(fill, state))
    x = jnp.asarray(rng.standard_normal((tokens, 64), np.float32))
    plain = Experts(config, spec, Precision("float32", loop_experts=looped))
    plain.router.weight = nnx.Param(module.router.weight[...])
    for name in ("gate_up", "down"):
        weight, scale, minimum = getattr(module, name).arrays
        assert scale is not None, "integers have scales"
        getattr(plain, name).weight = nnx.Param(int4.dequantized(weight, scale, minimum))
    got, want = (np.asarray(jax.jit(lambda x, m=m: m(x, STEP))(x)) for m in (module, plain))
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
