"""Layers with a state that each token changes, and attention with a gate, which models have beside them.

T tokens, N sequences, E hidden size, C channels, H heads of values, K heads of keys, D size of a key, V of a value.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rekindle_kernels
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn.layers import Attend, Attention, Recur, RopeTables, States
from rekindle._src.models.nn.linear import Linear, RMSNorm, parameter
from rekindle._src.models.precision import Precision
from rekindle_kernels import (
    ConvolutionOptions,
    DeltaOptions,
    DeltaWeights,
    RaggedBatch,
    ScanOptions,
    ScanWeights,
    causal_convolution,
    gated_delta,
    selective_scan,
)


class GatedDeltaNet(nnx.Module):
    """A gated delta rule behind a short convolution, with a gated norm before the output projection."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        spec, E = config.states[layer], config.hidden_size
        assert spec is not None, "the layer has a state"
        self.layer, gate = layer, spec.channels
        beta = gate + spec.heads * spec.value_size
        step = beta + spec.heads
        fixed = precision.deterministic
        self.options = DeltaOptions(spec.key_heads, gate, beta, step, config.norm_eps, fixed)
        self.convolved = ConvolutionOptions(silu=True, deterministic=fixed)
        self.inputs = Linear(step + spec.heads, E, precision)
        self.convolution = parameter((spec.channels, 1, spec.taps), jnp.float32)
        self.step_bias = parameter((spec.heads,), jnp.float32)
        self.log_rate = parameter((spec.heads,), jnp.float32)
        self.norm = RMSNorm(spec.value_size, config.norm_eps, precision)
        self.out = Linear(E, spec.heads * spec.value_size, precision, partial=True)

    def __call__(
        self,
        x: jax.Array,
        tables: RopeTables,
        attend: Attend,
        residual: jax.Array | None = None,
        norm: RMSNorm | None = None,
    ) -> jax.Array:
        """Compute the layer's result for norm(x), plus `residual`."""
        projected = self.inputs(x, norm=norm)
        weights = DeltaWeights(self.step_bias[...], self.log_rate[...], self.norm.weight[...])

        def compute(states: States, batch: RaggedBatch) -> tuple[jax.Array, States]:
            tail, matrices = states
            qkv, tail = causal_convolution(
                projected, _taps(self.convolution), None, tail, batch, options=self.convolved
            )
            y, matrices = gated_delta(qkv, projected, weights, matrices, batch, self.options)
            return y, (tail, matrices)

        with jax.named_scope("recur"):
            y = cast(Recur, attend).recur(self.layer, compute)
        return self.out(y.astype(x.dtype), residual=residual)


class StateSpace(nnx.Module):
    """Mamba-2: a selective scan behind a short convolution, with a gate and a norm before the output projection."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        spec, E = config.states[layer], config.hidden_size
        assert spec is not None, "the layer has a state"
        self.spec, self.layer = spec, layer
        inner = spec.heads * spec.value_size
        self.inputs = Linear(inner + spec.channels + spec.heads, E, precision)
        self.convolution = parameter((spec.channels, 1, spec.taps), jnp.float32)
        self.convolution_bias = parameter((spec.channels,), jnp.float32)
        self.step_bias = parameter((spec.heads,), jnp.float32)
        self.log_rate = parameter((spec.heads,), jnp.float32)
        self.skip = parameter((spec.heads,), jnp.float32)
        self.norm = nnx.data(RMSNorm(inner, config.norm_eps, precision) if spec.normed else None)
        self.out = Linear(E, inner, precision, partial=True)
        self.options = ScanOptions(spec.key_heads, inner + spec.channels, precision.deterministic)
        self.convolved = ConvolutionOptions(first=inner, silu=True, deterministic=precision.deterministic)
        self.factors = None if config.multipliers is None else config.multipliers.inputs
        self.shards = precision.shards

    def __call__(
        self,
        x: jax.Array,
        tables: RopeTables,
        attend: Attend,
        residual: jax.Array | None = None,
        norm: RMSNorm | None = None,
    ) -> jax.Array:
        """Compute the layer's result for norm(x), plus `residual`."""
        spec, inner = self.spec, self.spec.heads * self.spec.value_size
        projected = self.inputs(x, norm=norm)
        if self.factors is not None:
            keys = spec.key_heads * spec.key_size
            sizes = np.asarray([inner, inner, keys, keys, spec.heads])
            projected = projected * jnp.asarray(np.repeat(np.asarray(self.factors, np.float32), sizes), projected.dtype)
        weights = ScanWeights(self.step_bias[...], self.log_rate[...], self.skip[...])

        def compute(states: States, batch: RaggedBatch) -> tuple[jax.Array, States]:
            tail, matrices = states
            taps, bias = _taps(self.convolution), self.convolution_bias[...]
            channels, tail = causal_convolution(projected, taps, bias, tail, batch, options=self.convolved)
            y, matrices = selective_scan(channels, projected, weights, matrices, batch, self.options)
            return y, (tail, matrices)

        with jax.named_scope("recur"):
            y = cast(Recur, attend).recur(self.layer, compute)
        gates = jax.nn.silu(projected[:, :inner].astype(jnp.float32))
        y = self._normed(y) * gates if spec.norm_first else self._normed(y * gates)
        return self.out(y.astype(x.dtype), residual=residual)

    def _normed(self, y: jax.Array) -> jax.Array:
        """Return y [T, H · V] normed over the values of each head of keys."""
        if self.norm is None:
            return y
        if self.shards is not None and self.shards.sharing_keys > 1:
            mean = self.shards.mean_of_keys(jnp.mean(y * y, axis=-1))
            return y * jax.lax.rsqrt(mean + self.norm.eps)[:, None] * self.norm.weight[...]
        grouped = y.reshape(-1, y.shape[1] // self.spec.key_heads)
        ones, norm = jnp.ones(grouped.shape[1], jnp.float32), self.norm
        normed = rekindle_kernels.rms_norm(grouped, ones, norm.eps, implementation=norm.implementation)
        return normed.reshape(y.shape) * norm.weight[...]


class ShortConvolution(nnx.Module):
    """A convolution over a few positions between two gates, all of them made of the same input."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        spec, E = config.states[layer], config.hidden_size
        assert spec is not None, "the layer has a state"
        self.layer = layer
        C = spec.channels
        self.inputs = Linear(3 * C, E, precision)  # factors of its inputs, factors of its results, and the inputs
        self.options = ConvolutionOptions(first=2 * C, before=0, behind=C, deterministic=precision.deterministic)
        self.convolution = parameter((C, 1, spec.taps), jnp.float32)
        self.out = Linear(E, C, precision, partial=True)

    def __call__(
        self,
        x: jax.Array,
        tables: RopeTables,
        attend: Attend,
        residual: jax.Array | None = None,
        norm: RMSNorm | None = None,
    ) -> jax.Array:
        """Compute the layer's result for norm(x), plus `residual`."""
        projected = self.inputs(x, norm=norm)

        def compute(states: States, batch: RaggedBatch) -> tuple[jax.Array, States]:
            y, tail = causal_convolution(
                projected, _taps(self.convolution), None, states[0], batch, options=self.options
            )
            return y, (tail,)

        with jax.named_scope("recur"):
            y = cast(Recur, attend).recur(self.layer, compute)
        return self.out(y.astype(x.dtype), residual=residual)


class GatedAttention(Attention):
    """Attention whose output is multiplied by a sigmoid of what its query projection computes beside each head."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision, *, qk_norm: bool = False) -> None:
        super().__init__(config, layer, precision, qk_norm=qk_norm)
        rows = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        self.qkv = Linear(rows, config.hidden_size, precision, bias=config.qkv_bias)

    def project(self, x: jax.Array, norm: RMSNorm | None) -> tuple[jax.Array, jax.Array | None]:
        H, D = self.heads, self.head_dim
        projected = self.qkv(x, norm=norm).reshape(*x.shape[:-1], -1, D)
        queries = projected[..., : 2 * H, :].reshape(*x.shape[:-1], H, 2, D)
        return jnp.concatenate([queries[..., 0, :], projected[..., 2 * H :, :]], axis=-2), queries[..., 1, :]


class HeadGatedAttention(Attention):
    """Attention whose heads are multiplied by a sigmoid, one number for each."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision, *, qk_norm: bool = False) -> None:
        super().__init__(config, layer, precision, qk_norm=qk_norm)
        self.gate = Linear(config.num_heads, config.hidden_size, precision, quantize=False)

    def project(self, x: jax.Array, norm: RMSNorm | None) -> tuple[jax.Array, jax.Array | None]:
        qkv, _ = super().project(x, norm)
        return qkv, self.gate(x, norm=norm)[..., None]


def _taps(convolution: nnx.Param) -> jax.Array:
    """Return the weights [C, L] of a convolution that checkpoints store with an axis more."""
    return convolution[...].reshape(convolution.shape[0], -1)
