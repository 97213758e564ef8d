"""Layers with a state that each token changes: short convolutions, the gated delta rule, and Mamba-2's selective scan.

All three take a ragged batch and the state of each sequence before it, and return a result for each token and the
states after it. A sequence whose tokens begin at position 0 begins with zeros, whatever its state holds. Rows
of padding have finite results.

Axes: T tokens, N sequences, R decode rows, C channels, L taps of a convolution, H heads, D size of a key, V size of a
value, K heads of keys, G groups of heads, P slots.

A batch may say where its sequences' states are: `slots` are the places in an array of states [P, ...] that are read and
written. Then an operation takes the whole array and returns it with the new states, written in place where it can. What
a sequence reads no other sequence writes. Without slots an operation takes the states of the sequences [N, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rekindle_kernels.ops.registry import Registry, current_platform

CONVOLUTION = Registry("convolution")  # run(x, weight, bias, tails, batch, options) -> y, tails
GATED_DELTA = Registry("gated_delta")  # run(qkv, projected, weights, states, batch, options) -> y, states
SELECTIVE_SCAN = Registry("selective_scan")  # run(channels, projected, weights, states, batch, options) -> y, states

EDGE = 64  # positions whose multiples are the edges of chunks: then cold, cached and cut prompts add in the same order


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("lengths", "cu_lengths", "num_prefills", "slots"),
    meta_fields=("decode_rows",),
)
@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The sequences of a step's tokens, in the layout of `AttentionInputs`; a pytree."""

    lengths: jax.Array  # int32 [N], positions of each sequence, this step's included; 0 marks an empty row
    cu_lengths: jax.Array  # int32 [N-R+1], half-open offsets of each prefill sequence, from token R on
    num_prefills: jax.Array  # int32 [], how many of the N-R prefill sequences are real
    decode_rows: int  # R
    slots: tuple[jax.Array, jax.Array] | None = None  # int32 [N] each: which states are read, and which are written

    @property
    def sequences(self) -> int:
        """N."""
        return self.lengths.shape[0]

    @property
    def prefills(self) -> int:
        """N - R."""
        return self.sequences - self.decode_rows

    def prefill_lengths(self) -> jax.Array:
        """Return the tokens of each prefill sequence in this step [N-R], 0 for those that are not real."""
        lengths = self.cu_lengths[1:] - self.cu_lengths[:-1]
        return jnp.where(jnp.arange(self.prefills) < self.num_prefills, lengths, 0)

    def starts(self) -> jax.Array:
        """Return the position of each sequence's first token in this step [N]."""
        counts = jnp.concatenate([jnp.ones(self.decode_rows, jnp.int32), self.prefill_lengths()])
        return self.lengths - counts

    def begins(self) -> jax.Array:
        """Return True for sequences whose first position is in this step [N]: their states begin as zeros."""
        return self.starts() <= 0


@dataclass(frozen=True, slots=True)
class ConvolutionOptions:
    """The static options of a convolution; columns are those of x."""

    first: int = 0  # the column where the channels begin
    silu: bool = False  # results are silu of the sums
    before: int | None = None  # the column where factors of the inputs begin, one for each channel
    behind: int | None = None  # that of the factors of the results
    deterministic: bool = False  # a token's result is the same to the last bit in prompts and in decode rows


class DeltaWeights(NamedTuple):
    """The parameters of a gated delta rule."""

    step_bias: jax.Array  # [H]
    log_rate: jax.Array  # [H]
    norm: jax.Array  # [V]


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """The static options of a gated delta rule; columns are those of `projected`."""

    key_heads: int
    gate: int  # the column where the gates [H · V] begin
    beta: int  # that of the weights of corrections [H]
    step: int  # that of the steps [H]
    eps: float  # of the norm
    deterministic: bool = False  # a token's result is the same to the last bit in prompts and in decode rows


class ScanWeights(NamedTuple):
    """The parameters of a selective scan."""

    step_bias: jax.Array  # [H]
    log_rate: jax.Array  # [H]
    skip: jax.Array  # [H]


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """The static options of a selective scan."""

    groups: int  # G
    step: int  # the column of `projected` where the steps [H] begin
    deterministic: bool = False  # a token's result is the same to the last bit in prompts and in decode rows


@dataclass(frozen=True, slots=True)
class RecurrenceCall:
    """The static facts that select an implementation."""

    platform: str
    x: jax.ShapeDtypeStruct  # rows of the tokens
    projected: jax.ShapeDtypeStruct  # other rows of the tokens
    state: jax.ShapeDtypeStruct
    deterministic: bool = False


def _call(
    x: jax.Array,
    projected: jax.Array,
    states: jax.Array,
    platform: str | None,
    options: ConvolutionOptions | DeltaOptions | ScanOptions,
) -> RecurrenceCall:
    rows, others, state = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, projected, states))
    return RecurrenceCall(platform or current_platform(), rows, others, state, options.deterministic)


def causal_convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tails: jax.Array,
    batch: RaggedBatch,
    *,
    options: ConvolutionOptions = ConvolutionOptions(),
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel, a column of x [T, N], with weight [C, L] over the positions of its sequence.

    `tails` [N or P, L-1, C] are the last inputs before this step, factors included. Returns y [T, C] in float32 and the
    new tails.
    """
    chosen = CONVOLUTION.choose(_call(x, x, tails, platform, options), implementation)
    y, after = chosen.run(x, weight, bias, tails, batch, options)
    return y, after


def gated_delta(
    qkv: jax.Array,
    projected: jax.Array,
    weights: DeltaWeights,
    states: jax.Array,
    batch: RaggedBatch,
    options: DeltaOptions,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule: S ← S·exp(decay); S ← S + k ⊗ beta·(v - kᵀS); o = qᵀS.

    Rows of qkv are q [K, D], k [K, D] and v [H, V], for K heads of keys that H/K heads of values share. q and k get
    length one, and q a factor of D^-½. beta is the sigmoid of a column of `projected`, and decay is
    -exp(log_rate)·softplus(step + step_bias). States [N or P, H, D, V] are in float32.

    Returns norm(o)·silu(gate) [T, H · V] in float32, with an RMS norm of each head, and the new states.
    """
    chosen = GATED_DELTA.choose(_call(qkv, projected, states, platform, options), implementation)
    y, after = chosen.run(qkv, projected, weights, states, batch, options)
    return y, after


def selective_scan(
    channels: jax.Array,
    projected: jax.Array,
    weights: ScanWeights,
    states: jax.Array,
    batch: RaggedBatch,
    options: ScanOptions,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply Mamba-2's scan: S ← S·exp(decay·step) + step·b ⊗ x; y = cᵀS + skip·x.

    Rows of `channels` are x [H, V], b [G, D] and c [G, D], for H/G heads each. Steps are softplus of columns of
    `projected` and `step_bias`, and decay is -exp(log_rate). States [N or P, H, D, V] are in float32. Returns
    y [T, H · V] in float32 and the new states.
    """
    chosen = SELECTIVE_SCAN.choose(_call(channels, projected, states, platform, options), implementation)
    y, after = chosen.run(channels, projected, weights, states, batch, options)
    return y, after
