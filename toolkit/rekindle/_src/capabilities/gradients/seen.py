"""Pictures in the program of a gradient: their rows stand in the place of embeddings, and are operands.

Axes: T tokens with padding, L levels: the beginning of the stream, and the first layers after which rows of a picture
add more, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.capabilities.pictures.step import turns
from rekindle._src.core.prompt_rows import PromptRows
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.differentiable import Coordinates
from rekindle._src.models.hooks import Listener


class SeenRows(NamedTuple):
    """The operands of a prompt with pictures."""

    there: Any  # bool [T]
    rows: Any  # float32 [L, T, E]
    coordinates: Any  # int32 [T, 3]: of each token's position
    sees: Any  # int32 [T]: the end of each token's picture, where its tokens see each other; else 0


def seen_rows(use: PromptRows, length: int, size: int, model: ModelConfig) -> SeenRows:
    """Return the operands of a prompt of `length` tokens in a program for `size`."""
    levels = 1 if model.pictures is None else 1 + model.pictures.levels
    there, rows = np.zeros(size, bool), np.zeros((levels, size, model.hidden_size), np.float32)
    coordinates, sees = np.repeat(np.arange(size, dtype=np.int32)[:, None], 3, axis=1), np.zeros(size, np.int32)
    if use.coordinates is not None:
        coordinates[:length] = use.coordinates[:length]
    for span, own in zip(use.spans, use.rows, strict=True):
        place = slice(span.start, span.stop)
        there[place], sees[place] = True, span.stop if use.whole else 0
        rows[: len(own), place] = own
    return SeenRows(there, rows, coordinates, sees)


def places_of(seen: SeenRows, model: ModelConfig) -> Coordinates:
    """Return the places of a prompt's tokens."""
    positions = seen.coordinates if turns(model) else jnp.arange(seen.there.shape[0], dtype=jnp.int32)
    return Coordinates(positions, seen.sees)


def tokens_of(seen: SeenRows, tokens: Array, model: ModelConfig) -> Array:
    """Return the tokens for the embeddings of layers: the tokens of a picture are all the same."""
    token = None if model.pictures is None else model.pictures.token
    return tokens if token is None else jnp.where(seen.there, token, tokens)


def seeing(seen: SeenRows, after: Listener) -> Listener:
    """Return the listener that puts rows in the place of embeddings and adds levels, before another one listens."""

    def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
        own = after(site, layer)
        if site == "embedding":

            def change(x: Array) -> Array:
                return jnp.where(seen.there[:, None], seen.rows[0].astype(x.dtype), x)

        elif site == "residual" and layer < seen.rows.shape[0] - 1:

            def change(x: Array) -> Array:
                return x + seen.rows[layer + 1].astype(x.dtype)

        else:
            return own
        return change if own is None else lambda x: own(change(x))

    return listener
