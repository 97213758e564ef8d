"""Reference generation without the engine, which must agree with it: one request, a dense cache, a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.models.config import AttentionSpec, ModelConfig, Pages
from rekindle._src.models.config import Cache as Kept
from rekindle._src.models.nn.forward import Compute
from rekindle._src.models.nn.layers import soft_cap, soft_max
from rekindle_kernels import RaggedBatch

Layer = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]  # keys and values [length, K, D], and states [1, …]
Cache = tuple[Layer, ...]


def empty_cache(model: LoadedModel, length: int) -> Cache:
    """Return a cache of zeros for `length` tokens."""
    dtype = model.graph.precision.stream

    def layer(cache: Kept) -> Layer:
        shapes, pages = () if cache.state is None else cache.state.shapes, cache.pages
        states = tuple(jnp.zeros((1, *part), jnp.float32) for part in shapes)
        if not isinstance(pages, Pages):
            return (), states
        sizes = (pages.key_size, pages.value_size)
        return tuple(jnp.zeros((length, pages.heads, size), dtype) for size in sizes), states

    return tuple(map(layer, model.config.caches))


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, spec: AttentionSpec, sinks: jax.Array | None = None
) -> jax.Array:
    """Return the attention of q [T, H, D] at `positions` over keys and values [S, K, D] at positions 0…S-1."""
    T, H, D = q.shape
    grouped = q.reshape(T, k.shape[1], H // k.shape[1], D).astype(jnp.float32)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k.astype(jnp.float32), precision="highest")
    scores = soft_cap(scores * spec.scale, spec.soft_cap)
    visible = spec.sees(positions[:, None] - jnp.arange(k.shape[0]))
    weights = soft_max(jnp.where(visible, scores, -jnp.inf), sinks)
    return jnp.einsum("kgts,skd->tkgd", weights, v.astype(jnp.float32), precision="highest").reshape(T, H, -1)


@functools.partial(jax.jit, static_argnums=0)
def forward(
    graph: Graph, leaves: Sequence[Any], cache: Cache, tokens: jax.Array, start: jax.Array, prompt_length: jax.Array
) -> tuple[jax.Array, Cache]:
    """Return logits [T, V] of `tokens` [T] at positions start…start+T-1, and the cache with their keys and values."""
    model = merge(graph, leaves)
    positions = start + jnp.arange(tokens.shape[0])
    attend = DenseCache(graph.config, cache, start, tokens.shape[0])
    hidden = model(tokens, positions, attend, lengths=jnp.maximum(prompt_length, positions + 1))
    return model.logits(hidden), tuple(attend.layers)


class DenseCache:
    """The model's `attend` over dense keys, values and states of one sequence."""

    def __init__(self, config: ModelConfig, cache: Cache, start: jax.Array, count: int) -> None:
        self.layers, self._config, self._start = list(cache), config, start
        self._positions = start + jnp.arange(count)
        one = jnp.asarray([0, count], jnp.int32)
        self._batch = RaggedBatch((start + count).reshape(1), one, jnp.ones((), jnp.int32), 0)

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array | None, v: jax.Array | None, sinks: jax.Array | None = None, /
    ) -> jax.Array:
        keys, values = self.layers[self._config.source(layer)][0]
        if k is not None:
            v = k[..., : values.shape[-1]] if v is None else v
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype), self._start, 0)
            values = jax.lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), self._start, 0)
            self.layers[layer] = (keys, values), self.layers[layer][1]
        return attention(q, keys, values, self._positions, self._config.attention[layer], sinks)

    def recur(self, layer: int, compute: Compute, /) -> jax.Array:
        kept, states = self.layers[layer]
        result, states = compute(states, self._batch)
        self.layers[layer] = kept, states
        return result


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
