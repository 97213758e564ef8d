"""Mixtures of experts: each token is multiplied with the matrices of its chosen experts only.

T tokens, E hidden size, G experts, k chosen experts per token, M = T·k rows after routing, sorted by expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import rekindle_kernels
from rekindle._src.models.config import ModelConfig, MoeSpec
from rekindle._src.models.nn.linear import Linear, Matrix, RMSNorm, parameter
from rekindle._src.models.precision import Precision
from rekindle_kernels import LinearOptions, gated, narrow_dtype, quantize_rows


class Stack(Matrix):
    """The matrices of all experts as one parameter, [G, out, in]."""

    part = "experts"

    def __init__(self, shape: tuple[int, int, int], precision: Precision) -> None:
        super().__init__(shape, precision)
        self.values: str | None = None
        if precision.loop_experts and jnp.dtype(precision.weights).itemsize == 2:
            self.values = precision.weights
            self.weight = parameter(shape, jnp.uint16)  # the bits of 16-bit floats; linear.py explains why

    def store(self, path: str, kind: str) -> None:
        super().store(path, kind)
        self.values = None

    def of_expert(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """Compute x [rows, in] · one expert's matrix → [rows, out]."""
        weight, scale, minimum = (
            None if array is None else jax.lax.dynamic_index_in_dim(array, expert, keepdims=False)
            for array in self.arrays
        )
        assert weight is not None, "a stack has weights"
        if self.values is not None:
            weight = jax.lax.bitcast_convert_type(weight, jnp.dtype(self.values))
        # XLA's product takes the slice of the stack into its loop, where others have to copy it first. But XLA would
        # widen a whole slice of four bits in memory, eight times the size of the copy.
        name = self.implementation if self.packing is not None else "xla"
        options = LinearOptions(self.quantize, deterministic=self.packing is not None and self.deterministic)
        return rekindle_kernels.linear(x, weight, scale=scale, minimum=minimum, options=options, implementation=name)

    def grouped(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Compute x [M, in] → [M, out], the first sizes[0] rows with expert 0, the next sizes[1] with expert 1, …"""
        weight, packed, minimum = self.arrays
        if self.packing is not None:
            assert packed is not None, "integers have scales"
            return rekindle_kernels.grouped_linear(x, weight, sizes, scale=packed, minimum=minimum).astype(x.dtype)
        if self.quantize is None:
            return rekindle_kernels.grouped_linear(x.astype(weight.dtype), weight, sizes).astype(x.dtype)
        owner = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=x.shape[0])
        scale = self.scale[...][owner]
        if self.quantize == "int8":
            rows, row_scale = quantize_rows(x)
            y = rekindle_kernels.grouped_linear(rows, weight, sizes, dtype=jnp.int32).astype(jnp.float32) * row_scale
        else:
            y = rekindle_kernels.grouped_linear(x.astype(narrow_dtype(x)), weight, sizes)
        return (y * scale).astype(x.dtype)


class Experts(nnx.Module):
    """An MLP of experts: a router, and the matrices gate_up [G, 2·I, E] and down [G, E, I]."""

    def __init__(self, config: ModelConfig, spec: MoeSpec, precision: Precision) -> None:
        G, E, inner = spec.num_experts, config.hidden_size, spec.intermediate_size
        self.shards = precision.shards
        # The router stays in float32: a rounded logit can change which experts a token gets.
        self.router = Linear(G, E, Precision(stream=precision.stream, implementation="xla"))
        local = G if precision.shards is None else G // precision.shards.expert
        self.gate_up = Stack((local, 2 * inner, E), precision)
        self.down = Stack((local, E, inner), precision)
        self.spec, self.activation, self.looped = spec, config.activation, precision.loop_experts

    def __call__(self, x: jax.Array, residual: jax.Array | None = None, norm: RMSNorm | None = None) -> jax.Array:
        """Compute the experts of norm(x) [..., E] → [..., E], plus `residual` if there is one."""
        x = x if norm is None else norm(x)
        flat = x.reshape(-1, x.shape[-1])
        with jax.named_scope("route"):
            weights, chosen = self.route(flat)
            count, chosen = self._local_experts(chosen)
            order = jnp.argsort(chosen.reshape(-1))
            sizes = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(count), axis=0, dtype=jnp.int32)
            rows = flat[order // self.spec.top_k]
        with jax.named_scope("experts"):
            if self.looped:
                out = self.loop(rows, sizes)
            else:
                out = self.down.grouped(gated(self.gate_up.grouped(rows, sizes), self.activation), sizes)
        with jax.named_scope("combine"):
            if count < self.spec.num_experts:  # rows of other devices' experts are last, and hold no results
                valid = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
                out = jnp.where(valid[:, None], out, jnp.zeros_like(out))
            # A gather restores the order of the tokens: XLA:CPU runs a scatter one element at a time.
            out = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
            y = jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=-2)
        y = y.astype(x.dtype).reshape(x.shape)
        y = y if self.shards is None else self.shards.sum(y)
        return y if residual is None else residual + y

    def _local_experts(self, chosen: jax.Array) -> tuple[int, jax.Array]:
        """Return the number of this device's experts, and the chosen ones counted from its first: others' are last."""
        count = self.spec.num_experts
        if self.shards is None or self.shards.expert == 1:
            return count, chosen
        first, local = self.shards.experts_here(count)
        return local, (chosen - first) % count

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weights float32 [T, k] and the experts int32 [T, k] of each token."""
        scores = jax.nn.softmax(self.router(x.astype(jnp.float32)), axis=-1)
        weights, chosen = jax.lax.top_k(scores, self.spec.top_k)
        if self.spec.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen

    def loop(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Compute rows [M, E], sorted by expert, → [M, E], a block of rows of one expert at a time.

        XLA:CPU computes a ragged product by multiplying all rows with all experts: 64 experts, 8 per token, [384, 512]
        in float32 took 218, 497 and 2473 ms for 2, 32 and 256 tokens, where this loop took 1, 6 and 14.
        """
        M, G = rows.shape[0], sizes.shape[0]
        size = block_rows(M, self.spec.num_experts)
        blocks = (sizes + size - 1) // size
        owner = jnp.repeat(jnp.arange(G), blocks, total_repeat_length=min(M, M // size + G))
        start, first = jnp.cumsum(sizes) - sizes, jnp.cumsum(blocks) - blocks
        padded = jnp.pad(rows, ((0, size), (0, 0)))

        def body(block: jax.Array, out: jax.Array) -> jax.Array:
            expert = owner[block]
            offset = start[expert] + (block - first[expert]) * size
            x = jax.lax.dynamic_slice_in_dim(padded, offset, size)
            y = self.down.of_expert(gated(self.gate_up.of_expert(x, expert), self.activation), expert)
            # Rows beyond the expert's own are overwritten by the blocks that follow, or lie in the padding.
            return jax.lax.dynamic_update_slice_in_dim(out, y, offset, 0)

        return jax.lax.fori_loop(0, jnp.sum(blocks), body, jnp.zeros_like(padded))[:M]


def block_rows(rows: int, experts: int) -> int:
    """Return the rows of a block: twice an expert's average share, from 2 (one row is slow) to 64 (no gain beyond)."""
    return min(64, max(2, 1 << (max(1, 2 * rows // experts) - 1).bit_length()))
