"""Mixtures of experts: each token is multiplied with the matrices of its chosen experts only.

T tokens, E hidden size, G experts, k chosen experts per token, M = T·k rows after routing, sorted by expert.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import rekindle_kernels
from rekindle._src.models.config import ModelConfig, MoeSpec
from rekindle._src.models.hooks import ExpertsDelta
from rekindle._src.models.nn.forward import ForwardPass
from rekindle._src.models.nn.layers import GatedMlp, PlainMlp
from rekindle._src.models.nn.linear import Linear, Matrix, RMSNorm, parameter
from rekindle._src.models.precision import Precision
from rekindle_kernels import LinearOptions, activate, gated, narrow_dtype, quantize_rows


class Stack(Matrix):
    """The matrices of all experts as one parameter, [G, out, in], and perhaps their biases [G, out]."""

    part = "experts"
    delta: ExpertsDelta | None = None  # of one trace; see `models/hooks.py`

    def __init__(self, shape: tuple[int, int, int], precision: Precision, *, bias: bool = False) -> None:
        super().__init__(shape, precision)
        self.bias = nnx.data(parameter(shape[:2], jnp.float32) if bias else None)
        self.values: str | None = None
        if precision.loop_experts and jnp.dtype(precision.weights).itemsize == 2:
            self.values = precision.weights
            self.weight = parameter(shape, jnp.uint16)  # the bits of 16-bit floats; linear.py explains why

    def store(self, path: str, kind: str) -> None:
        super().store(path, kind)
        self.values = None

    def of_expert(self, x: Array, expert: Array, count: Array, gate: str | None = None) -> Array:
        """Compute x [rows, in] · one expert's matrix → [rows, out], with `gate` gated by that activation.

        Rows after the first `count` are undefined.
        """
        weight, scale, minimum = self.arrays
        options = LinearOptions(
            self.quantize,
            gate if self.bias is None else None,
            deterministic=self.packing is not None and self.deterministic,
            values=self.values,
        )
        y = rekindle_kernels.linear(
            x,
            weight,
            scale=scale,
            minimum=minimum,
            count=count,
            expert=expert,
            options=options,
            implementation=self.implementation,
        )
        if self.bias is None:
            return y
        y = y + self.bias[...][expert].astype(y.dtype)
        return y if gate is None else gated(y, gate, implementation=self.implementation)

    def grouped(self, x: Array, sizes: Array) -> Array:
        """Compute x [M, in] → [M, out], the first sizes[0] rows with expert 0, the next sizes[1] with expert 1, …"""
        other = self.products.grouped(x, self, sizes)
        y = self._grouped(x, sizes) if other is None else other
        if self.bias is None:
            return y
        owner = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=x.shape[0])
        return y + self.bias[...][owner].astype(y.dtype)

    def _grouped(self, x: Array, sizes: Array) -> Array:
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
    """An MLP of experts: a router, the matrices gate_up [G, 2·I, E] and down [G, E, I], and the shared MLP.

    Experts without a gate have I rows in place of 2·I, and experts of a latent vector its size in place of E.
    """

    routes_normed = True  # the router reads the input of the experts, else the input of their norm

    def __init__(self, config: ModelConfig, spec: MoeSpec, precision: Precision) -> None:
        G, E, inner = spec.num_experts, config.hidden_size, spec.intermediate_size
        self.shards = precision.shards
        # The router stays in float32: a rounded logit can change which experts a token gets.
        plain = Precision(stream=precision.stream, implementation="xla")
        self.router = Linear(G, E, plain, bias=spec.bias)
        self.correction = nnx.data(parameter((G,), jnp.float32) if spec.correction else None)
        inner_config = dataclasses.replace(config, intermediate_size=spec.shared_size, mlp_bias=False)
        beside = GatedMlp if spec.gated else PlainMlp
        self.shared = nnx.data(beside(inner_config, precision) if spec.shared_size else None)
        self.shared_gate = nnx.data(Linear(1, E, plain) if spec.shared_gate else None)
        local = G if precision.shards is None else G // precision.shards.expert
        width = spec.latent_size or E
        self.narrow = nnx.data(Linear(width, E, precision) if spec.latent_size else None)
        self.widen = nnx.data(Linear(E, width, precision) if spec.latent_size else None)
        self.gate_up = Stack((local, (1 + spec.gated) * inner, width), precision, bias=spec.bias)
        self.down = Stack((local, width, inner), precision)
        # Of all experts: on a mesh it is added once, to the sum of the devices' products.
        self.down_bias = nnx.data(parameter((G, E), jnp.float32) if spec.bias else None)
        self.spec, self.activation, self.looped = spec, config.activation, precision.loop_experts

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None
    ) -> Array:
        """Compute the experts of norm(x) [..., E] → [..., E], plus `residual` if there is one."""
        unnormed, x = x, x if norm is None else norm(x)
        flat = x.reshape(-1, x.shape[-1])
        with jax.named_scope("route"):
            weights, among_all = self.route(flat if self.routes_normed else unnormed.reshape(flat.shape))
            weights, among_all = step.at("gates", weights), step.at("experts", among_all)
            count, chosen = self._local_experts(among_all)
            order = jnp.argsort(chosen.reshape(-1))
            sizes = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(count), axis=0, dtype=jnp.int32)
            read = flat if self.narrow is None else self.narrow(flat)
            rows = read[order // self.spec.top_k]
        with jax.named_scope("experts"):
            out = self.compute(rows, sizes, order // self.spec.top_k)
        with jax.named_scope("combine"):
            if count < self.spec.num_experts:  # rows of other devices' experts are last, and hold no results
                valid = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
                out = jnp.where(valid[:, None], out, jnp.zeros_like(out))
            # A gather restores the order of the tokens: XLA:CPU runs a scatter one element at a time.
            out = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
            y = weighted_sum(out, weights)
        y = y.astype(x.dtype)
        y = y if self.widen is None else self.widen(y)
        y = y.reshape(x.shape)
        y = y if self.shards is None else self.shards.sum(y)
        if self.down_bias is not None:
            biases = weighted_sum(self.down_bias[...][among_all], weights)
            y = y + biases.astype(x.dtype).reshape(x.shape)
        if self.shared is not None:
            y = y + self._shared_result(x, step)
        return y if residual is None else residual + y

    def compute(self, rows: Array, sizes: Array, tokens: Array) -> Array:
        """Compute rows [M, E], sorted by expert, → [M, E]; `tokens` [M] are the rows' tokens.

        Deltas are added to both products; where neither is needed, experts are computed as without them.
        """
        first, last = self.gate_up.delta, self.down.delta
        if first is None or last is None:
            assert first is last, "both matrices have a delta, or neither"
            return self._without_deltas(rows, sizes)

        def with_deltas() -> Array:
            wide = self.product(self.gate_up, rows, sizes)
            hidden = self.activated(first.add_to_rows(wide, rows, sizes, tokens))
            out = self.product(self.down, hidden, sizes)
            return last.add_to_rows(out, hidden, sizes, tokens)

        result: Array = jax.lax.cond(first.needed | last.needed, with_deltas, lambda: self._without_deltas(rows, sizes))
        return result

    def _without_deltas(self, rows: Array, sizes: Array) -> Array:
        if self.looped:
            return self.loop(rows, sizes)
        return self.product(self.down, self.activated(self.product(self.gate_up, rows, sizes)), sizes)

    def product(self, stack: Stack, rows: Array, sizes: Array) -> Array:
        """Compute rows [M, in], sorted by expert, times each one's matrix of a stack → [M, out]."""
        if self.looped:
            return in_blocks(rows, sizes, stack.of_expert, stack.shape[1], experts=self.spec.num_experts)
        return stack.grouped(rows, sizes)

    def activated(self, x: Array) -> Array:
        """Return the input of `down`."""
        if self.spec.gated:
            return gated(x, self.activation, implementation=self.down.implementation)
        return activate(x, self.activation)

    def _shared_result(self, x: Array, step: ForwardPass) -> Array:
        assert self.shared is not None, "there is one"
        with jax.named_scope("shared"):
            y: Array = self.shared(x, step)
            if self.shared_gate is None:
                return y
            return (y * jax.nn.sigmoid(self.shared_gate(x.astype(jnp.float32)))).astype(x.dtype)

    def _local_experts(self, chosen: Array) -> tuple[int, Array]:
        """Return the number of this device's experts, and the chosen ones counted from its first: others' are last."""
        count = self.spec.num_experts
        if self.shards is None or self.shards.expert == 1:
            return count, chosen
        first, local = self.shards.experts_here(count)
        return local, (chosen - first) % count

    def route(self, x: Array) -> tuple[Array, Array]:
        """Return the weights float32 [T, k] and the experts int32 [T, k] of each token."""
        spec, logits = self.spec, self.router(x.astype(jnp.float32))
        scores = jax.nn.softmax(logits, axis=-1) if spec.scoring == "softmax" else jax.nn.sigmoid(logits)
        ranks = scores if self.correction is None else scores + self.correction[...]
        weights, chosen = jax.lax.top_k(self._of_best_groups(ranks), spec.top_k)
        if self.correction is not None:
            weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if spec.normalize:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / (total + spec.epsilon if spec.epsilon else total)
        return (weights if spec.scale == 1.0 else weights * spec.scale), chosen

    def _of_best_groups(self, ranks: Array) -> Array:
        """Return ranks [T, G] with -inf outside of the best groups, which the sum of their best experts decides."""
        spec = self.spec
        if spec.top_groups == spec.groups:
            return ranks
        grouped = ranks.reshape(*ranks.shape[:-1], spec.groups, -1)
        best, _ = jax.lax.top_k(grouped, min(spec.group_best, grouped.shape[-1]))
        _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), spec.top_groups)
        mask = jnp.any(kept[..., None] == jnp.arange(spec.groups), axis=-2)
        return jnp.where(mask[..., None], grouped, -jnp.inf).reshape(ranks.shape)

    def loop(self, rows: Array, sizes: Array) -> Array:
        """Compute rows [M, E], sorted by expert, → [M, E], a block of rows of one expert at a time.

        XLA:CPU computes a ragged product by multiplying all rows with all experts: 64 experts, 8 per token, [384, 512]
        in float32 took 218, 497 and 2473 ms for 2, 32 and 256 tokens, where this loop took 1, 6 and 14.
        """

        def both(x: Array, expert: Array, count: Array) -> Array:
            hidden = self.gate_up.of_expert(x, expert, count, self.activation if self.spec.gated else None)
            hidden = hidden if self.spec.gated else activate(hidden, self.activation)
            return self.down.of_expert(hidden, expert, count)

        return in_blocks(rows, sizes, both, rows.shape[1], experts=self.spec.num_experts)


class ScaledExperts(Experts):
    """Experts with a norm of the router's own, and a factor for the results of each expert."""

    routes_normed = False

    def __init__(self, config: ModelConfig, spec: MoeSpec, precision: Precision) -> None:
        super().__init__(config, spec, precision)
        self.router_norm = RMSNorm(config.hidden_size, config.norm_eps, Precision(stream=precision.stream))
        self.expert_scalar = parameter((spec.num_experts,), jnp.float32)

    def route(self, x: Array) -> tuple[Array, Array]:
        weights, chosen = super().route(self.router_norm(x) * x.shape[-1] ** -0.5)
        return weights * self.expert_scalar[...][chosen], chosen


def weighted_sum(results: Array, weights: Array) -> Array:
    """Compute the sum of results [T, k, E], each times its weight [T, k], → float32 [T, E].

    It is a chain of additions: XLA:CPU hands a reduction of such an axis to a library, which took 200 µs for one token
    with four experts of 2,880 outputs, where the chain took 7, and 3.6 ms for 1,024 tokens with eight, where it took 1.
    """
    terms = results.astype(jnp.float32) * weights[..., None]
    return functools.reduce(jnp.add, (terms[:, choice] for choice in range(terms.shape[1])))


def in_blocks(
    rows: Array, sizes: Array, compute: Callable[[Array, Array, Array], Array], width: int, *, experts: int
) -> Array:
    """Compute rows [M, in], sorted by expert, → [M, width], by calls of `compute` with a block of rows of one expert.

    Its arguments are a block, the expert, and how many rows of the block are the expert's: the others' results don't
    matter. `experts` counts the experts of all devices.
    """
    M, G = rows.shape[0], sizes.shape[0]
    size = block_rows(M, experts)
    blocks = (sizes + size - 1) // size
    owner = jnp.repeat(jnp.arange(G), blocks, total_repeat_length=min(M, M // size + G))
    start, first = jnp.cumsum(sizes) - sizes, jnp.cumsum(blocks) - blocks
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def body(block: Array, out: Array) -> Array:
        expert = owner[block]
        before = (block - first[expert]) * size
        offset, count = start[expert] + before, jnp.minimum(size, sizes[expert] - before)
        y = compute(jax.lax.dynamic_slice_in_dim(padded, offset, size), expert, count)
        # Rows beyond the expert's own are overwritten by the blocks that follow, or lie in the padding.
        return jax.lax.dynamic_update_slice_in_dim(out, y, offset, 0)

    empty = jnp.zeros((M + size, width), rows.dtype)
    return jax.lax.fori_loop(0, jnp.sum(blocks), body, empty)[:M]


def block_rows(rows: int, experts: int) -> int:
    """Return the rows of a block: twice an expert's average share, from 2 (one row is slow) to 64 (no gain beyond)."""
    return min(64, max(2, 1 << (max(1, 2 * rows // experts) - 1).bit_length()))
