"""Layers with a state that each token changes, and the gated attention that such models also have.

T tokens, N sequences, E hidden size, C channels, H heads of values, K heads of keys, D size of a key, V of a value.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rekindle._src.models.config import ModelConfig, RecurrentSpec
from rekindle._src.models.nn.forward import ForwardPass, States
from rekindle._src.models.nn.layers import QkNormAttention
from rekindle._src.models.nn.linear import Linear, RMSNorm, norm_rows, parameter
from rekindle._src.models.precision import Precision
from rekindle_kernels import (
    ChannelDeltaOptions,
    ConvolutionOptions,
    DeltaOptions,
    DeltaWeights,
    RaggedBatch,
    ScanOptions,
    ScanWeights,
    causal_convolution,
    channel_delta,
    gated_delta,
    selective_scan,
)


class RecurrentLayer(nnx.Module):
    """A layer with a state: an input projection, a short convolution and what follows it, and an output projection."""

    convolution_bias: nnx.Param | None = None

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        precision: Precision,
        *,
        inputs: int,
        outputs: int,
        convolved: ConvolutionOptions,
    ) -> None:
        spec, E = _state(config, layer), config.hidden_size
        self.convolved = convolved
        self.inputs = Linear(inputs, E, precision)
        self.convolution = parameter((spec.channels, 1, spec.kernel), jnp.float32)
        self.out = Linear(E, outputs, precision, partial=True)

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        """Compute the layer's result for norm(x), plus `residual`."""
        projected = self.project(x, norm)
        with jax.named_scope("recur"):
            y = step.recur(functools.partial(self.compute, projected))
        return self.out(self.finish(y, projected).astype(x.dtype), residual=residual)

    def project(self, x: Array, norm: RMSNorm | None) -> Array:
        """Return the input projection of norm(x)."""
        return self.inputs(x, norm=norm)

    def compute(self, projected: Array, states: States, batch: RaggedBatch) -> tuple[Array, States]:
        """Return the results of the convolution, and the states after it."""
        kernel = self.convolution[...].reshape(self.convolution.shape[0], -1)  # checkpoints store an axis more
        bias = None if self.convolution_bias is None else self.convolution_bias[...]
        y, tail = causal_convolution(projected, kernel, bias, states[0], batch, options=self.convolved)
        return y, (tail,)

    def finish(self, y: Array, projected: Array) -> Array:
        """Return the input of the output projection."""
        return y


def _state(config: ModelConfig, layer: int) -> RecurrentSpec:
    spec = config.states[layer]
    assert spec is not None, "the layer has a state"
    return spec


class GatedDeltaNet(RecurrentLayer):
    """A gated delta rule after the convolution, with a gated norm before the output projection."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        spec, fixed = _state(config, layer), precision.deterministic
        gate, outputs = spec.channels, spec.heads * spec.value_size
        beta = gate + outputs
        step = beta + spec.heads
        convolved = ConvolutionOptions(silu=True, deterministic=fixed)
        super().__init__(config, layer, precision, inputs=step + spec.heads, outputs=outputs, convolved=convolved)
        self.options = DeltaOptions(spec.key_heads, gate, beta, step, config.norm_eps, fixed)
        self.step_bias = parameter((spec.heads,), jnp.float32)
        self.log_rate = parameter((spec.heads,), jnp.float32)
        self.norm = RMSNorm(spec.value_size, config.norm_eps, precision)

    def compute(self, projected: Array, states: States, batch: RaggedBatch) -> tuple[Array, States]:
        qkv, tail = super().compute(projected, states, batch)
        weights = DeltaWeights(self.step_bias[...], self.log_rate[...], self.norm.weight[...])
        y, matrices = gated_delta(qkv, projected, weights, states[1], batch, self.options)
        return y, (*tail, matrices)


class ChannelDeltaNet(RecurrentLayer):
    """Kimi's delta rule, with a decay for each channel of a key, after the convolution; a gated norm follows it."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        spec, fixed = _state(config, layer), precision.deterministic
        gate, outputs, keys = spec.channels, spec.heads * spec.value_size, spec.heads * spec.key_size
        step = gate + outputs
        beta = step + keys
        convolved = ConvolutionOptions(silu=True, deterministic=fixed)
        super().__init__(config, layer, precision, inputs=beta + spec.heads, outputs=outputs, convolved=convolved)
        self.options = ChannelDeltaOptions(gate, beta, step, config.norm_eps, spec.decay_bound, fixed)
        self.step_bias = parameter((keys,), jnp.float32)
        self.log_rate = parameter((spec.heads,), jnp.float32)
        self.norm = RMSNorm(spec.value_size, config.norm_eps, precision)

    def compute(self, projected: Array, states: States, batch: RaggedBatch) -> tuple[Array, States]:
        qkv, tail = super().compute(projected, states, batch)
        weights = DeltaWeights(self.step_bias[...], self.log_rate[...], self.norm.weight[...])
        y, matrices = channel_delta(qkv, projected, weights, states[1], batch, self.options)
        return y, (*tail, matrices)


class StateSpace(RecurrentLayer):
    """Mamba-2: a selective scan after the convolution, with a gate and a norm before the output projection."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        self.spec = spec = _state(config, layer)
        inner, fixed = spec.heads * spec.value_size, precision.deterministic
        convolved = ConvolutionOptions(first=inner, silu=True, deterministic=fixed)
        inputs = inner + spec.channels + spec.heads
        super().__init__(config, layer, precision, inputs=inputs, outputs=inner, convolved=convolved)
        self.convolution_bias = parameter((spec.channels,), jnp.float32)
        self.step_bias = parameter((spec.heads,), jnp.float32)
        self.log_rate = parameter((spec.heads,), jnp.float32)
        self.skip = parameter((spec.heads,), jnp.float32)
        self.norm = nnx.data(RMSNorm(inner, config.norm_eps, precision) if spec.normed else None)
        self.options = ScanOptions(spec.key_heads, inner + spec.channels, fixed)
        self.factors = None if config.multipliers is None else config.multipliers.inputs
        self.shards = precision.shards

    def project(self, x: Array, norm: RMSNorm | None) -> Array:
        spec, projected = self.spec, self.inputs(x, norm=norm)
        if self.factors is None:
            return projected
        inner, keys = spec.heads * spec.value_size, spec.key_heads * spec.key_size
        sizes = np.asarray([inner, inner, keys, keys, spec.heads])
        return projected * jnp.asarray(np.repeat(np.asarray(self.factors, np.float32), sizes), projected.dtype)

    def compute(self, projected: Array, states: States, batch: RaggedBatch) -> tuple[Array, States]:
        channels, tail = super().compute(projected, states, batch)
        weights = ScanWeights(self.step_bias[...], self.log_rate[...], self.skip[...])
        y, matrices = selective_scan(channels, projected, weights, states[1], batch, self.options)
        return y, (*tail, matrices)

    def finish(self, y: Array, projected: Array) -> Array:
        gates = jax.nn.silu(projected[:, : y.shape[1]].astype(jnp.float32))
        return self._normed(y) * gates if self.spec.norm_first else self._normed(y * gates)

    def _normed(self, y: Array) -> Array:
        """Return y [T, H · V] normed over the values of each head of keys."""
        if self.norm is None:
            return y
        if self.shards is not None and self.shards.sharing_keys > 1:
            mean = self.shards.mean_of_keys(jnp.mean(y * y, axis=-1))
            return y * jax.lax.rsqrt(mean + self.norm.eps)[:, None] * self.norm.weight[...]
        grouped = y.reshape(-1, y.shape[1] // self.spec.key_heads)
        normed = norm_rows(grouped, None, self.norm.eps, self.norm.implementation)
        return normed.reshape(y.shape) * self.norm.weight[...]


class ShortConvolution(RecurrentLayer):
    """A convolution over a few positions between two gates, all of them made of the same input."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        C = _state(config, layer).channels  # factors of its inputs, factors of its results, and the inputs
        convolved = ConvolutionOptions(first=2 * C, before=0, behind=C, deterministic=precision.deterministic)
        super().__init__(config, layer, precision, inputs=3 * C, outputs=C, convolved=convolved)


class GatedAttention(QkNormAttention):
    """Attention that multiplies its output by the sigmoid of gates, which the query projection computes."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        rows = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        self.qkv = Linear(rows, config.hidden_size, precision, bias=config.qkv_bias)

    def project(self, x: Array, norm: RMSNorm | None) -> tuple[Array, Array | None]:
        H, D = self.heads, self.head_dim
        projected = self.qkv(x, norm=norm).reshape(*x.shape[:-1], -1, D)
        queries = projected[..., : 2 * H, :].reshape(*x.shape[:-1], H, 2, D)
        return jnp.concatenate([queries[..., 0, :], projected[..., 2 * H :, :]], axis=-2), queries[..., 1, :]


class HeadGatedAttention(QkNormAttention):
    """Attention with each head multiplied by a sigmoid, one number for each."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.gate = Linear(config.num_heads, config.hidden_size, precision, quantize=False)

    def project(self, x: Array, norm: RMSNorm | None) -> tuple[Array, Array | None]:
        qkv, _ = super().project(x, norm)
        return qkv, self.gate(x, norm=norm)[..., None]
