"""Masks on the device: bits to logits, and rows that are left without a token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from rekindle._src.core.guides import mask_words
from rekindle._src.programs.token_masks import NO_TOKEN, among, masked, with_dead_ends


def mask_of(allowed: list[list[int]], vocab: int) -> np.ndarray:
    masks = np.zeros((len(allowed), mask_words(vocab)), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            masks[row, token // 32] |= np.uint32(1 << token % 32)
    return masks.view(np.int32)


def test_a_bit_of_zero_is_minus_infinity() -> None:
    for vocab in (5, 32, 70):
        logits = jnp.arange(2 * vocab, dtype=jnp.float32).reshape(2, vocab)
        found = np.asarray(masked(logits, jnp.asarray(mask_of([[0, 3], [vocab - 1]], vocab))))
        assert np.flatnonzero(np.isfinite(found[0])).tolist() == [0, 3]
        assert np.flatnonzero(np.isfinite(found[1])).tolist() == [vocab - 1]
        free = masked(logits, jnp.full((2, mask_words(vocab)), -1, jnp.int32))
        assert np.array_equal(free, logits), "a row without a guide keeps every logit"


def test_a_row_without_a_token_is_told_and_no_other() -> None:
    logits = jnp.asarray([[1.0, 2.0, -1e9], [1.0, 2.0, -1e9], [-1e9, -1e9, -1e9], [0.0, 1.0, 2.0]], jnp.float32)
    masks = mask_of([[2], [0, 2], [], []], 3)
    masks[2] = -1  # unguided, with a bias on everything
    tokens, values = among(jnp.asarray(masks))(logits, lambda found: jnp.argmax(found, axis=-1))
    told = with_dead_ends(tokens, jnp.asarray(masks), values)
    assert np.asarray(told).tolist() == [NO_TOKEN, 0, 0, NO_TOKEN]
