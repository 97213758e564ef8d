"""Layers with a state that each token changes: short convolutions, the gated delta rule, and Mamba-2's selective scan.

All three take a ragged batch and the state of each sequence before it, and return a result for each token and the
states after it. A sequence whose tokens begin at position 0 begins with zeros, whatever its state holds.

Axes: T tokens, N sequences, R decode rows, C channels, L taps of a convolution, H heads, D size of a key, V size of a
value, G groups of heads, P slots.

A batch may say where its sequences' states are: `slots` are the places in an array of states [P, ...] that are read and
written. Then an operation takes the whole array and returns it with the new states, written in place where it can. What
a sequence reads no other sequence writes. Without slots an operation takes the states of the sequences [N, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from rekindle_kernels.ops.registry import Registry, current_platform

CONVOLUTION = Registry("convolution")  # run(x, weight, bias, tails, batch) -> y, tails
GATED_DELTA = Registry("gated_delta")  # run(q, k, v, decay, beta, states, batch) -> o, states
SELECTIVE_SCAN = Registry("selective_scan")  # run(x, step, decay, b, c, states, batch) -> y, states

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
class RecurrenceCall:
    """The static facts that select an implementation."""

    platform: str
    tokens: int
    decode_rows: int
    sequences: int
    state: jax.ShapeDtypeStruct


def _call(batch: RaggedBatch, tokens: jax.Array, states: jax.Array, platform: str | None) -> RecurrenceCall:
    shape = jax.ShapeDtypeStruct(states.shape, states.dtype)
    return RecurrenceCall(platform or current_platform(), tokens.shape[0], batch.decode_rows, batch.sequences, shape)


def causal_convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tails: jax.Array,
    batch: RaggedBatch,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel of x [T, C] with weight [C, L] over the positions of its sequence.

    `tails` [N or P, L-1, C] are the last inputs before this step. Returns y [T, C] in float32 and the new tails.
    """
    chosen = CONVOLUTION.choose(_call(batch, x, tails, platform), implementation)
    y, after = chosen.run(x, weight, bias, tails, batch)
    return y, after


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule: S ← S·exp(decay); S ← S + k ⊗ beta·(v - kᵀS); o = qᵀS.

    q and k [T, H, D], v [T, H, V], decay ≤ 0 and beta [T, H], states [N or P, H, D, V] in float32. The caller norms and
    scales q and k. Returns o [T, H, V] in float32 and the new states.
    """
    chosen = GATED_DELTA.choose(_call(batch, q, states, platform), implementation)
    o, after = chosen.run(q, k, v, decay, beta, states, batch)
    return o, after


def selective_scan(
    x: jax.Array,
    step: jax.Array,
    decay: jax.Array,
    b: jax.Array,
    c: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply Mamba-2's scan: S ← S·exp(decay·step) + step·b ⊗ x; y = cᵀS.

    x [T, H, V], step ≥ 0 [T, H], decay < 0 [H], b and c [T, G, D] for H/G heads each, states [N or P, H, D, V] in
    float32. Returns y [T, H, V] in float32 and the new states.
    """
    chosen = SELECTIVE_SCAN.choose(_call(batch, x, states, platform), implementation)
    y, after = chosen.run(x, step, decay, b, c, states, batch)
    return y, after
