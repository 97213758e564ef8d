"""The initial weights look back as they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rekindle._src.models.base import merge
from rekindle._src.models.registry import config_from_hf
from rekindle._src.tiny_training.recipe import Recipe
from rekindle._src.tiny_training.train import initial


def looked_at(tokens: list[int]) -> np.ndarray:
    """[2, H, T]: where each head of the first two blocks looks most, from each position."""
    recipe = Recipe()
    config = config_from_hf(recipe.config([0], 0))
    T, found = len(tokens), []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, config.group_size, axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * config.attention[layer].scale
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf), axis=-1)
        found.append(np.asarray(weights.argmax(-1)))
        return jnp.einsum("hqk,khd->qhd", weights, v)

    merge(*initial(recipe, config))(jnp.asarray(tokens), jnp.arange(T), attend)
    return np.stack(found[:2])


def test_heads_look_back_by_position_and_then_by_what_they_found() -> None:
    line = [int(token) for token in np.random.default_rng(0).choice(2048, 24, replace=False)]
    found = looked_at(line * 3)
    at = np.arange(72)
    for head, distance in enumerate((1, 2, 3)):
        assert np.mean(found[0, head, 8:] == at[8:] - distance) > 0.8
    # From the second line on: the token that followed this one a line, or two lines, ago. Chance is about 3 %.
    followed = found[1, 0, 24:]
    assert np.mean((followed == at[24:] - 23) | (followed == at[24:] - 47)) > 0.5
