"""The layers that families are built from.

T tokens (flat: a whole ragged batch), E hidden size, H query heads, K kv heads, D head dim, I intermediate size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rekindle._src.models.config import ModelConfig, Multipliers
from rekindle._src.models.nn.forward import ForwardPass, RopeTables
from rekindle._src.models.nn.linear import Linear, RMSNorm, parameter
from rekindle._src.models.precision import Precision
from rekindle_kernels import activate, gated


class LayerNorm(nnx.Module):
    """Layer norm: (x - mean) / deviation · weight + bias over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        self.weight = parameter((size,), jnp.float32)
        self.bias = nnx.data(parameter((size,), jnp.float32) if bias else None)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        normed = centred * scale * self.weight[...]
        return (normed if self.bias is None else normed + self.bias[...]).astype(x.dtype)


class Attention(nnx.Module):
    """An attention layer: fused q, k and v projection, optional norms of q and k, rope, `attend`, output projection."""

    norms_heads = False

    def __init__(self, config: ModelConfig, layer: int, precision: Precision, *, inputs: int | None = None) -> None:
        """Make the layer. `inputs` is the size of its inputs, by default the size of hidden states."""
        H, K, D = config.num_heads, config.pages_of(layer).heads, config.pages_of(layer).key_size
        self.qkv = Linear((H + 2 * K) * D, inputs or config.hidden_size, precision, bias=config.qkv_bias)
        self.out = Linear(config.hidden_size, H * D, precision, bias=config.o_bias, partial=True)
        # One weight row per head: q and k are normed, and rotated, as one array of H + K heads.
        self.qk_norm = RMSNorm((H + K, D), config.norm_eps, precision) if self.norms_heads else None
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.rope = config.attention[layer].rope
        self.implementation = precision.implementation

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        """Compute the attention of norm(x), plus `residual`."""
        q, k, v, gate = self.split(x, step.tables, norm)
        with jax.named_scope("attend"):
            y = self.attended(step, q, k, v)
        return self.join(y, gate, x.dtype, residual)

    def split(self, x: Array, tables: RopeTables, norm: RMSNorm | None) -> tuple[Array, Array, Array, Array | None]:
        """Return q, k and v of norm(x), normed and rotated, and what gates the result, if anything."""
        qkv, gate = self.project(x, norm)
        q, k, v = tables.split(
            self.normed(qkv), qkv, self.heads, self.rope, self.qk_norm, implementation=self.implementation
        )
        return q, k, v, gate

    def join(self, y: Array, gate: Array | None, dtype: DTypeLike, residual: Array | None) -> Array:
        """Return the layer's result, plus `residual`, from the attended values [..., H, D] and the gate of `split`."""
        y = y if gate is None else y.astype(dtype) * jax.nn.sigmoid(gate)
        return self.out(y.reshape(*y.shape[:-2], self.heads * self.head_dim).astype(dtype), residual=residual)

    def project(self, x: Array, norm: RMSNorm | None) -> tuple[Array, Array | None]:
        """Return q, k and v of norm(x) [..., H + 2K, D], and what gates the result, [..., H, D or 1], if anything."""
        return self.qkv(x, norm=norm).reshape(*x.shape[:-1], self.heads + 2 * self.kv_heads, self.head_dim), None

    def normed(self, qkv: Array) -> Array:
        """Return q and k [..., H + K, D], the input of `qk_norm` and rope. Heads after those are ignored."""
        return qkv

    def attended(self, step: ForwardPass, q: Array, k: Array, v: Array) -> Array:
        """Return the attention of heads that are normed and rotated."""
        return step.attend(q, k, v)


class QkNormAttention(Attention):
    """Attention with norms over each head of q and k."""

    norms_heads = True


class GatedMlp(nnx.Module):
    """A gated MLP, down(act(gate(x)) · up(x)). Gate and up are fused in one matrix, gate's rows first."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        inner, E = config.intermediate_size, config.hidden_size
        self.gate_up = Linear(2 * inner, E, precision, bias=config.mlp_bias)
        self.down = Linear(E, inner, precision, bias=config.mlp_bias, partial=True)
        self.activation = config.activation

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        """Compute the MLP of norm(x), plus `residual`."""
        return self.down(self.gate_up(x, norm=norm, gate=self.activation), residual=residual)


class MultipliedMlp(GatedMlp):
    """A gated MLP with a factor for its gate and one for its result."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        self.multipliers = config.multipliers or Multipliers()

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        gate, up = jnp.split(self.gate_up(x, norm=norm), 2, axis=-1)
        gate_up = jnp.concatenate([gate * self.multipliers.gate, up], axis=-1)
        inner = gated(gate_up, self.activation, implementation=self.down.implementation)
        y: Array = self.down(inner) * self.multipliers.mlp
        return y if residual is None else residual + y


class PlainMlp(nnx.Module):
    """An MLP without a gate, down(act(up(x)))."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        inner, E = config.intermediate_size, config.hidden_size
        self.up = Linear(inner, E, precision, bias=config.mlp_bias)
        self.down = Linear(E, inner, precision, bias=config.mlp_bias, partial=True)
        self.activation = config.activation

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        return self.down(activate(self.up(x, norm=norm), self.activation), residual=residual)


class XieluMlp(PlainMlp):
    """An MLP of xIELU, without a gate. The activation is a parabola above zero and an integrated exponential below.

    It has four numbers in each layer: the curvatures above and below zero, stored before softplus, the slope at zero,
    and the largest input of the exponential.
    """

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        self.above, self.below = parameter((1,), jnp.float32), parameter((1,), jnp.float32)
        self.slope, self.limit = parameter((1,), jnp.float32), parameter((1,), jnp.float32)

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        inner = self.up(x, norm=norm)
        return self.down(self._activated(inner.astype(jnp.float32)).astype(inner.dtype), residual=residual)

    def _activated(self, x: Array) -> Array:
        slope, limit = self.slope[...], self.limit[...]
        above, below = jax.nn.softplus(self.above[...]), slope + jax.nn.softplus(self.below[...])
        curve = jnp.where(x > 0, above * x * x, below * (jnp.expm1(jnp.minimum(x, limit)) - x))
        return curve + slope * x


def soft_cap(x: Array, cap: float | None) -> Array:
    """Limit x smoothly to ±cap: cap · tanh(x / cap). None changes nothing."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def soft_max(scores: Array, sinks: Array | None = None) -> Array:
    """Return softmax over the last axis of scores [..., T, S]; leading axes are heads, and `sinks` are theirs."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    column = jnp.broadcast_to(sinks.reshape(*scores.shape[:-2], 1, 1), (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column.astype(scores.dtype)], axis=-1), axis=-1)[..., :-1]
