"""Mixtures of experts: each token is multiplied by its chosen experts only.

T tokens, E hidden size, G experts, k chosen experts per token, M = T·k rows after routing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from rekindle.models.config import ModelConfig, MoeSpec
from rekindle.models.layers import gated
from rekindle.models.linear import Linear, Matrix, Precision, quantize_rows


class Experts(nnx.Module):
    """Router, fused gate_up [G, 2·I, E] and down [G, E, I]."""

    def __init__(self, config: ModelConfig, spec: MoeSpec, precision: Precision) -> None:
        G, E, inner = spec.num_experts, config.hidden_size, spec.intermediate_size
        # The router stays in float32: a rounded logit can change which experts a token gets.
        self.router = Linear(G, E, Precision(stream=precision.stream))
        self.gate_up = Matrix((G, 2 * inner, E), precision)
        self.down = Matrix((G, E, inner), precision)
        self.spec, self.activation = spec, config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., E] → [..., E]."""
        flat = x.reshape(-1, x.shape[-1])
        with jax.named_scope("route"):
            weights, chosen = self.route(flat)
            order, sizes = by_expert(chosen, self.spec.num_experts)
        with jax.named_scope("experts"):
            rows = flat[order // self.spec.top_k]
            hidden = gated(grouped(rows, self.gate_up, sizes), self.activation)
            out = grouped(hidden, self.down, sizes)
        with jax.named_scope("combine"):
            # Back into token order by a gather: XLA:CPU runs a scatter one element at a time.
            out = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
            y = jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=-2)
        return y.astype(x.dtype).reshape(x.shape)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights float32 [T, k] and experts int32 [T, k] of each token."""
        scores = jax.nn.softmax(self.router(x.astype(jnp.float32)), axis=-1)
        weights, chosen = jax.lax.top_k(scores, self.spec.top_k)
        if self.spec.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen


def by_expert(chosen: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """The order [M] that sorts the flat choices [T·k] by expert, and how many each expert got [G]."""
    flat = chosen.reshape(-1)
    sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return jnp.argsort(flat), sizes


def grouped(x: jax.Array, matrix: Matrix, sizes: jax.Array) -> jax.Array:
    """x [M, in], sorted by expert, times each row's own matrix [out, in] → [M, out] in x's dtype."""
    weight = matrix.weight[...]
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    if matrix.quantize is None:
        return jax.lax.ragged_dot_general(
            x.astype(weight.dtype), weight, sizes, numbers, preferred_element_type=jnp.float32
        ).astype(x.dtype)
    owner = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=x.shape[0])
    scale = matrix.scale[...][owner]
    if matrix.quantize == "int8":
        rows, row_scale = quantize_rows(x)
        y = jax.lax.ragged_dot_general(rows, weight, sizes, numbers, preferred_element_type=jnp.int32)
        return (y.astype(jnp.float32) * row_scale * scale).astype(x.dtype)
    narrow = jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype
    y = jax.lax.ragged_dot_general(
        x.astype(narrow), weight.astype(narrow), sizes, numbers, preferred_element_type=jnp.float32
    )
    return (y * scale).astype(x.dtype)
