"""The loss of a batch of windows, with causal attention inside each window.

B windows, S tokens of a window, T = B·S, H query heads, K kv heads, G = H/K, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rekindle._src.models.base import Graph, merge
from rekindle._src.models.nn.layers import Attend
from rekindle._src.tiny_training.batches import PAD

CHUNKS = 4  # of a window's queries


def causal(rows: int, length: int, scale: float) -> Attend:
    """Return causal attention within each window.

    Queries are computed in four chunks, each with the keys up to its end: 0.62 of the scores of the full square.
    """
    step = -(-length // CHUNKS)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, /) -> jax.Array:
        T, H, D = q.shape
        K = k.shape[1]
        q = (q * scale).reshape(rows, length, K, H // K, D).transpose(0, 2, 3, 1, 4)
        k, v = (x.reshape(rows, length, K, D).transpose(0, 2, 1, 3) for x in (k, v))
        parts = []
        for start in range(0, length, step):
            stop = min(start + step, length)
            scores = jnp.einsum("bkgqd,bksd->bkgqs", q[..., start:stop, :], k[:, :, :stop])
            visible = jnp.arange(stop) <= jnp.arange(start, stop)[:, None]
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
            parts.append(jnp.einsum("bkgqs,bksd->bkgqd", weights, v[:, :, :stop]))
        return jnp.concatenate(parts, axis=3).transpose(0, 3, 1, 2, 4).reshape(T, H, D)

    return attend


def logits(graph: Graph, leaves: Sequence[Any], tokens: jax.Array) -> jax.Array:
    """Return the logits [B, S, V] of tokens [B, S]."""
    model = merge(graph, leaves)
    B, S = tokens.shape
    positions = jnp.tile(jnp.arange(S), B)
    hidden = model(tokens.reshape(-1), positions, causal(B, S, model.config.attention[0].scale))
    return model.logits(hidden).reshape(B, S, -1)


def losses(graph: Graph, leaves: Sequence[Any], windows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each token's loss, whether it counts and whether it was most likely, all [B, S], for windows [B, S+1]."""
    inputs, targets = jnp.maximum(windows[:, :-1], 0), windows[:, 1:]
    scores = logits(graph, leaves, inputs)
    target_scores = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    counts = targets != PAD
    return (
        jnp.where(counts, jax.nn.logsumexp(scores, axis=-1) - target_scores, 0.0),
        counts,
        scores.argmax(-1) == targets,
    )


def mean_loss(leaves: Sequence[Any], graph: Graph, windows: jax.Array) -> jax.Array:
    """Return the mean loss of the tokens that count."""
    loss, counts, _ = losses(graph, leaves, windows)
    return loss.sum() / jnp.maximum(counts.sum(), 1)
