"""Attention over whole texts for derivatives in reverse, some queries after others: a block reads the keys it sees.

The backward pass needs the results and a number for each query and head, the logarithm of its softmax's divisor; it
computes the weights again from queries and keys, in one pass. Keys that a block's queries don't see are left out of
products, so that causal attention takes little more than half of them.

Axes: B texts, T tokens of each, H query heads, K KV heads, G = H / K, D head size, t queries of a block, s their keys.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.models.base import Model
from rekindle._src.models.config import AttentionSpec
from rekindle._src.models.kept import Keep, keep_nothing
from rekindle._src.models.plain import PlainAttention

BLOCK = 128  # queries; fewer make small products
COMPILED_BLOCKS = 16  # at most: each is compiled on its own


class BlockedAttention(PlainAttention):
    """A model's `attend` over texts of one length. It has derivatives by queries, keys, values and sinks."""

    def __init__(self, module: Model, length: int, rows: int = 1, keep: Keep = keep_nothing) -> None:
        super().__init__(module, length, rows)
        self._keep = keep

    def attention(self, q: Array, k: Array, v: Array, spec: AttentionSpec, sinks: Array | None) -> Array:
        queries, keys, values = (jnp.swapaxes(self._lines(heads), 1, 2) for heads in (q, k, v))
        B, K = keys.shape[:2]
        queries = queries.reshape(B, K, -1, *queries.shape[2:])  # [B, K, G, T, D]
        columns = None if sinks is None else sinks.astype(jnp.float32).reshape(K, -1)
        result = _attention(spec, *jax.lax.stop_gradient((queries, keys, values, columns)))
        result = AttentionResult(*map(self._keep, result))
        out = _known(spec, queries, keys, values, columns, result)
        out = jnp.swapaxes(out.reshape(B, -1, *out.shape[3:]), 1, 2)
        return out.reshape(-1, *out.shape[2:]).astype(q.dtype)


class AttentionResult(NamedTuple):
    """The results of attention, and the divisors of its softmax."""

    out: Array  # [B, K, G, T, D]
    divisor: Array  # [B, K, G, T], its logarithm


class QueryBlock(NamedTuple):
    """Some queries, and the keys that they see."""

    queries: slice
    keys: slice
    masked: bool  # they don't see all of these


def blocks_of(spec: AttentionSpec, length: int) -> list[QueryBlock]:
    """Cut the queries of a text into blocks."""
    size = max(BLOCK, -(-length // COMPILED_BLOCKS))
    blocks = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        distances = np.arange(start - length + 1, stop)
        seen = distances[np.asarray(spec.sees(distances))]
        first, last = max(0, start - int(seen[-1])), min(length, stop - int(seen[0])) - 1
        inside = bool(np.all(spec.sees(np.arange(start - last, stop - first))))
        blocks.append(QueryBlock(slice(start, stop), slice(first, last + 1), not inside))
    return blocks


def _scores(spec: AttentionSpec, block: QueryBlock, q: Array, k: Array) -> Array:
    """Compute the scores [B, K, G, t, s] of queries [B, K, G, t, D] and keys [B, K, s, D]."""
    scores = _by_heads("bkrd,bksd->bkrs", q, k) * spec.scale
    scores = scores if spec.soft_cap is None else jnp.tanh(scores / spec.soft_cap) * spec.soft_cap
    if not block.masked:
        return scores
    queries, keys = (jnp.arange(part.start, part.stop) for part in (block.queries, block.keys))
    return jnp.where(spec.sees(queries[:, None] - keys), scores, -jnp.inf)


def _by_heads(formula: str, rows: Array, matrix: Array) -> Array:
    """Compute products of [B, K, G, t, …] with a matrix of each KV head: [B, K, G, t, …]."""
    flat = rows.reshape(*rows.shape[:2], -1, rows.shape[-1])
    result = jnp.einsum(formula, flat, matrix, precision="highest")
    return result.reshape(*rows.shape[:4], -1)


def _attention(spec: AttentionSpec, q: Array, k: Array, v: Array, sinks: Array | None) -> AttentionResult:
    outs, divisors = [], []
    for block in blocks_of(spec, q.shape[3]):
        keys, values = k[:, :, block.keys], v[:, :, block.keys]
        scores = _scores(spec, block, q[:, :, :, block.queries], keys)
        most = jnp.max(scores, axis=-1, keepdims=True)
        if sinks is not None:
            most = jnp.maximum(most, sinks[:, :, None, None])
        weights = jnp.exp(scores - most)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sinks[:, :, None, None] - most)
        outs.append(_by_heads("bkrs,bksd->bkrd", weights, values) / total)
        divisors.append((most + jnp.log(total))[..., 0])
    return AttentionResult(jnp.concatenate(outs, axis=3), jnp.concatenate(divisors, axis=3))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _known(spec: AttentionSpec, q: Array, k: Array, v: Array, sinks: Array | None, result: AttentionResult) -> Array:
    """Return the results as they are. Derivatives flow to the other operands."""
    return result.out


Operands = tuple[Array, Array, Array, Array | None, AttentionResult]
Changes = tuple[Array, Array, Array, Array | None, None]


def _forward(spec: AttentionSpec, *operands: *Operands) -> tuple[Array, Operands]:
    return operands[-1].out, operands


def _backward(spec: AttentionSpec, operands: Operands, change: Array) -> Changes:
    q, k, v, sinks, (out, divisor) = operands
    common = jnp.sum(change * out, axis=-1)  # [B, K, G, T]: the mean change of a query's weights
    of_q, of_k, of_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for block in blocks_of(spec, q.shape[3]):
        keys, values = k[:, :, block.keys], v[:, :, block.keys]
        own, of_out = q[:, :, :, block.queries], change[:, :, :, block.queries]
        scores, pull = jax.vjp(functools.partial(_scores, spec, block), own, keys)
        weights = jnp.exp(scores - divisor[:, :, :, block.queries, None])
        of_weights = _by_heads("bkrd,bksd->bkrs", of_out, values)
        of_own, of_keys = pull(weights * (of_weights - common[:, :, :, block.queries, None]))
        of_values = jnp.einsum("bkgts,bkgtd->bksd", weights, of_out, precision="highest")
        around = (block.keys.start, k.shape[2] - block.keys.stop)
        of_q.append(of_own)
        of_k += jnp.pad(of_keys, ((0, 0), (0, 0), around, (0, 0)))
        of_v += jnp.pad(of_values, ((0, 0), (0, 0), around, (0, 0)))
    of_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks[:, :, None] - divisor) * common, axis=(0, 3))
    return jnp.concatenate(of_q, axis=3), of_k, of_v, of_sinks, None


_known.defvjp(_forward, _backward)
