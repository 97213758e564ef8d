"""Reference generation without the engine, which must agree with it: one request, a dense cache, a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.models.config import AttentionSpec
from rekindle._src.models.nn.layers import soft_cap

Cache = tuple[tuple[jax.Array, jax.Array], ...]  # per layer keys and values [length, K, D]


def empty_cache(model: LoadedModel, length: int) -> Cache:
    """Return a cache of zeros for `length` tokens."""
    config = model.config
    shape = (length, config.num_kv_heads, config.head_dim)
    dtype = model.graph.precision.stream
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Return the attention of q [T, H, D] at `positions` over keys and values [S, K, D] at positions 0…S-1."""
    T, H, D = q.shape
    grouped = q.reshape(T, k.shape[1], H // k.shape[1], D).astype(jnp.float32)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k.astype(jnp.float32), precision="highest")
    scores = soft_cap(scores * spec.scale, spec.soft_cap)
    keys = jnp.arange(k.shape[0])
    visible = keys <= positions[:, None]
    if spec.sliding_window is not None:
        visible &= keys > positions[:, None] - spec.sliding_window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("kgts,skd->tkgd", weights, v.astype(jnp.float32), precision="highest").reshape(T, H, D)


@functools.partial(jax.jit, static_argnums=0)
def forward(
    graph: Graph, leaves: Sequence[Any], cache: Cache, tokens: jax.Array, start: jax.Array, prompt_length: jax.Array
) -> tuple[jax.Array, Cache]:
    """Return logits [T, V] of `tokens` [T] at positions start…start+T-1, and the cache with their keys and values."""
    model = merge(graph, leaves)
    positions = start + jnp.arange(tokens.shape[0])
    new = list(cache)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = new[layer]
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype), start, 0)
        values = jax.lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), start, 0)
        new[layer] = (keys, values)
        return attention(q, keys, values, positions, model.config.attention[layer])

    hidden = model(tokens, positions, attend, lengths=jnp.maximum(prompt_length, positions + 1))
    return model.logits(hidden), tuple(new)


def prefill(
    model: LoadedModel, prompt: Sequence[int], cache: Cache, chunk: int | None = None
) -> tuple[jax.Array, Cache]:
    """Return logits [len(prompt), V] and the cache, computed `chunk` tokens at a time."""
    chunk = chunk or len(prompt)
    parts = []
    for start in range(0, len(prompt), chunk):
        tokens = jnp.asarray(prompt[start : start + chunk], jnp.int32)
        logits, cache = forward(model.graph, model.leaves, cache, tokens, jnp.int32(start), jnp.int32(len(prompt)))
        parts.append(logits)
    return jnp.concatenate(parts), cache


def choose(logits: jax.Array, temperature: float, seed: int, position: int) -> int:
    """Return the token at `position`; a draw depends on logits, seed and position only."""
    if temperature == 0.0:
        return int(jnp.argmax(logits))
    key = jax.random.fold_in(jax.random.key(seed), position)
    return int(jax.random.categorical(key, logits / temperature))


def generate(
    model: LoadedModel,
    prompt: Sequence[int],
    max_tokens: int = 32,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    chunk: int | None = None,
    eos_ids: Sequence[int] = (),
) -> list[int]:
    """Return the generated token ids, up to and including the first of `eos_ids`."""
    cache = empty_cache(model, len(prompt) + max_tokens)
    logits, cache = prefill(model, prompt, cache, chunk)
    tokens = [choose(logits[-1], temperature, seed, len(prompt))]
    while len(tokens) < max_tokens and tokens[-1] not in eos_ids:
        position = len(prompt) + len(tokens) - 1
        logits, cache = forward(
            model.graph,
            model.leaves,
            cache,
            jnp.asarray(tokens[-1:], jnp.int32),
            jnp.int32(position),
            jnp.int32(len(prompt)),
        )
        tokens.append(choose(logits[-1], temperature, seed, position + 1))
    return tokens
