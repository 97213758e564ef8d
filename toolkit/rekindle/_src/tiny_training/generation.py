"""Continues many prompts at once, in one program, for evaluation by prompts.

R prompts, P the longest one's tokens, N new tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from rekindle._src.bench import reference
from rekindle._src.models.base import Graph, LoadedModel
from rekindle._src.tiny_training.corpus import END, TURN_END
from rekindle._src.tiny_training.tokenizer import token_id

ROUND = 64  # prompts are padded to a multiple, so that few programs are compiled


@partial(jax.jit, static_argnames=("graph", "new"))
def _generate(
    graph: Graph,
    leaves: Sequence[Any],
    prompts: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    ends: jax.Array,
    *,
    new: int,
) -> jax.Array:
    """Return new tokens [R, N] for prompts [R, P] padded behind their lengths [R]; end tokens repeat to the end."""
    R, P = prompts.shape
    config = graph.config
    shape = (R, P + new, config.num_kv_heads, config.head_dim)
    cache = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers))

    def forward(cache: reference.Cache, tokens: jax.Array, start: jax.Array) -> tuple[jax.Array, reference.Cache]:
        return reference.forward(graph, leaves, cache, tokens, start, start + tokens.shape[0])

    def choose(logits: jax.Array, number: jax.Array) -> jax.Array:
        sample = jax.random.categorical(jax.random.fold_in(key, number), logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, sample, logits.argmax(-1)).astype(jnp.int32)

    logits, cache = jax.vmap(forward)(cache, prompts, jnp.zeros(R, jnp.int32))
    first = choose(jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0], jnp.int32(0))

    def step(state: tuple[Any, jax.Array], number: jax.Array) -> tuple[tuple[Any, jax.Array], jax.Array]:
        cache, last = state
        logits, cache = jax.vmap(forward)(cache, last[:, None], lengths + number - 1)
        is_end = jnp.isin(last, ends)
        return (cache, jnp.where(is_end, last, choose(logits[:, 0], number))), last

    _, outputs = jax.lax.scan(step, (cache, first), jnp.arange(1, new + 1))
    return outputs.T


def continue_prompts(
    model: LoadedModel, words: Tokenizer, prompts: Sequence[str], new: int, temperature: float = 0.0, seed: int = 0
) -> list[str]:
    """Return the continuation of each prompt, up to an end token or `new` tokens."""
    # Native kernels cannot be mapped over prompts.
    graph = dataclasses.replace(model.graph, precision=dataclasses.replace(model.graph.precision, implementation="xla"))
    prompt_ids = [encoding.ids for encoding in words.encode_batch(list(prompts))]
    length = -(-max(map(len, prompt_ids)) // ROUND) * ROUND
    padded = np.zeros((len(prompt_ids), length), np.int32)
    for row, ids in zip(padded, prompt_ids, strict=True):
        row[: len(ids)] = ids
    ends = [token_id(words, token) for token in (END, TURN_END)]
    outputs = _generate(
        graph,
        model.leaves,
        jnp.asarray(padded),
        jnp.asarray([len(ids) for ids in prompt_ids]),
        jax.random.key(seed),
        jnp.float32(temperature),
        jnp.asarray(ends),
        new=new,
    )
    texts = []
    for row in np.asarray(outputs).tolist():
        stop = next((at for at, token in enumerate(row) if token in ends), len(row))
        texts.append(words.decode(row[:stop]))
    return texts
