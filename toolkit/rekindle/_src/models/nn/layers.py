"""The layers that families are built from.

T tokens (flat: a whole ragged batch), E hidden size, H query heads, K kv heads, D head dim, I intermediate size.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

import rekindle_kernels
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn import rope
from rekindle._src.models.nn.linear import Linear, RMSNorm, parameter
from rekindle._src.models.precision import Precision


class Attend(Protocol):
    """Attention, supplied by the caller, who chooses the place of keys and values: pages, a dense cache, or none.

    It is called once per layer with this call's queries [T, H, D], keys and values [T, K, D], normed and rotated; it
    stores the keys and values, applies `config.attention[layer]` and returns [T, H, D].
    """

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, /) -> jax.Array: ...


class LayerNorm(nnx.Module):
    """Layer norm: (x - mean) / deviation · weight + bias over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = parameter((size,), jnp.float32)
        self.bias = parameter((size,), jnp.float32)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        return (centred * scale * self.weight[...] + self.bias[...]).astype(x.dtype)


class RopeTables:
    """The cosines and sines of a step's positions, computed once per distinct rope and shared by the layers."""

    def __init__(self, config: ModelConfig, positions: jax.Array, lengths: jax.Array | None = None) -> None:
        with jax.named_scope("rope"):
            self.tables = {spec: rope.tables(spec, positions, lengths) for spec in config.ropes}

    @classmethod
    def of(cls, tables: dict[rope.RopeSpec, tuple[jax.Array, jax.Array]]) -> RopeTables:
        """Return an object with tables that were computed before."""
        instance = cls.__new__(cls)
        instance.tables = tables
        return instance

    def split(
        self,
        qk: jax.Array,
        qkv: jax.Array,
        heads: int,
        spec: rope.RopeSpec | None,
        norm: RMSNorm | None,
        *,
        implementation: str | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q [T, H, D] and k [T, K, D], normed and rotated, of qk [T, ≥ H + K, D], and v [T, K, D] of qkv."""
        cos, sin = (None, None) if spec is None else self.tables[spec]
        weight, eps = (None, 0.0) if norm is None else (norm.weight[...], norm.eps)
        return rekindle_kernels.rope(
            qk, qkv, cos, sin, heads=heads, norm=weight, eps=eps, implementation=implementation
        )


class Attention(nnx.Module):
    """An attention layer: fused q, k and v projection, optional norms of q and k, rope, `attend`, output projection."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision, *, qk_norm: bool = False) -> None:
        H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear((H + 2 * K) * D, config.hidden_size, precision, bias=config.qkv_bias)
        self.out = Linear(config.hidden_size, H * D, precision, bias=config.o_bias, partial=True)
        # One weight row per head: q and k are normed, and rotated, as one array of H + K heads.
        self.qk_norm = RMSNorm((H + K, D), config.norm_eps, precision) if qk_norm else None
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.layer, self.rope = layer, config.attention[layer].rope
        self.implementation = precision.implementation

    def __call__(
        self,
        x: jax.Array,
        tables: RopeTables,
        attend: Attend,
        residual: jax.Array | None = None,
        norm: RMSNorm | None = None,
    ) -> jax.Array:
        """Compute the attention of norm(x), plus `residual`."""
        H, K = self.heads, self.kv_heads
        qkv = self.qkv(x, norm=norm).reshape(*x.shape[:-1], H + 2 * K, self.head_dim)
        q, k, v = tables.split(self.normed(qkv), qkv, H, self.rope, self.qk_norm, implementation=self.implementation)
        with jax.named_scope("attend"):
            y = attend(self.layer, q, k, v)
        return self.out(y.reshape(*x.shape[:-1], H * self.head_dim).astype(x.dtype), residual=residual)

    def normed(self, qkv: jax.Array) -> jax.Array:
        """Return q and k [..., H + K, D], the input of `qk_norm` and rope. Heads after those are ignored."""
        return qkv


class GatedMlp(nnx.Module):
    """A gated MLP, down(act(gate(x)) · up(x)). Gate and up are fused in one matrix, gate's rows first."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        inner, E = config.intermediate_size, config.hidden_size
        self.gate_up = Linear(2 * inner, E, precision, bias=config.mlp_bias)
        self.down = Linear(E, inner, precision, bias=config.mlp_bias, partial=True)
        self.activation = config.activation

    def __call__(self, x: jax.Array, residual: jax.Array | None = None, norm: RMSNorm | None = None) -> jax.Array:
        """Compute the MLP of norm(x), plus `residual`."""
        return self.down(self.gate_up(x, norm=norm, gate=self.activation), residual=residual)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Limit x smoothly to ±cap: cap · tanh(x / cap). None changes nothing."""
    return x if cap is None else jnp.tanh(x / cap) * cap
