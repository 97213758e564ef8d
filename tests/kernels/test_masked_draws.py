"""Tokens among those that masks allow: every implementation takes what it takes with minus infinity elsewhere."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.thorough import by_default
from rekindle_kernels import Choice, Wanted, draw, draws_in_one_call, greedy, unavailable_reason
from rekindle_kernels.native import sampling
from rekindle_kernels.ops.sampling import mask_words
from rekindle_kernels.xla.sampling import masked

needs_native = pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
EVERYTHING = Wanted(*jnp.array([True] * 4))
WIDTHS = [1, 31, 33, 300, 1000, 4096, 50257]  # blocks of 32, 64 and 256, whole and not
OPTIONS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 200, 1.0, 0.0),
    (1.5, 0, 0.9, 0.0), (1.0, 0, 0.2, 0.0), (1.0, 0, 1.0, 0.2), (1.0, 40, 0.9, 0.01), (2.0, 10**9, 0.99, 0.0),
]  # fmt: skip
REPEATS = 6


def packed(allowed: np.ndarray) -> np.ndarray:
    """Pack rows of booleans into masks; the bits after the vocabulary are 1, as in a row without a guide."""
    rows, width = allowed.shape
    bits = np.ones((rows, mask_words(width) * 32), bool)
    bits[:, :width] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def some_allowed(random: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Rows of every kind in turn: all tokens, half of them, few, one, the last, one block, all but one, none."""
    allowed = np.zeros((rows, width), bool)
    for row in range(rows):
        kind = row % 8
        if kind in (0, 6):
            allowed[row] = True
        if kind == 1:
            allowed[row] = random.random(width) < 0.5
        if kind in (2, 3, 6):
            allowed[row, random.integers(0, width, 9 if kind == 2 else 1)] ^= True
        if kind == 4:
            allowed[row, -1] = True
        if kind == 5:
            start = random.integers(0, width)
            allowed[row, start : start + 70] = True
    return allowed


def options(rows: int) -> Choice:
    columns = np.array([OPTIONS[row // 8 % len(OPTIONS)] for row in range(rows)]).T
    temperature, top_k, top_p, min_p = columns
    seeds = np.random.default_rng(7).integers(0, 2**32, (rows, 2), np.uint32)
    floats = (jnp.asarray(values, jnp.float32) for values in (temperature, top_p, min_p))
    warm, share, least = floats
    return Choice(warm, jnp.asarray(top_k, jnp.int32), share, least, jnp.asarray(seeds), jnp.arange(rows) * 31 + 2)


@pytest.fixture(params=["xla", pytest.param("native", marks=needs_native)])
def implementation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("width", by_default(WIDTHS, lambda width: width == 1000))
def test_a_masked_draw_is_the_draw_with_minus_infinity_elsewhere(implementation: str, width: int) -> None:
    """To the last token, whatever the options: what is forbidden adds exactly 0 to every sum."""
    random = np.random.default_rng(width)
    rows = 8 * len(OPTIONS)
    choice = options(rows)
    run = jax.jit(partial(draw, implementation=implementation))
    for _ in range(REPEATS if width < 1_000 else 1):
        logits = jnp.asarray(random.standard_normal((rows, width)) * 3, jnp.float32)
        allowed = some_allowed(random, rows, width)
        masks = jnp.asarray(packed(allowed))
        got = np.asarray(run(logits, choice, EVERYTHING, masks))
        want = np.asarray(run(jnp.where(allowed, logits, -jnp.inf), choice, EVERYTHING))
        assert got.tolist() == want.tolist()
        free = allowed.any(axis=1)
        assert allowed[np.arange(rows), got][free].all()
        unmasked = np.asarray(run(logits, choice, EVERYTHING))
        assert got[::8].tolist() == unmasked[::8].tolist(), "a row whose mask allows all is not touched"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_that_is_allowed(implementation: str, width: int) -> None:
    random = np.random.default_rng(width)
    logits = random.integers(-9, 9, (32, width)).astype(np.float32)
    allowed = some_allowed(random, 32, width)
    got = jax.jit(partial(greedy, implementation=implementation))(logits, jnp.asarray(packed(allowed)))
    want = np.where(allowed, logits, -np.inf).argmax(axis=1)
    assert np.asarray(got).tolist() == want.tolist(), "the first of equals, and the first token where none is left"


@needs_native
def test_both_implementations_draw_the_same_tokens_from_masks() -> None:
    random, rows, width = np.random.default_rng(3), 40 * len(OPTIONS), 1000
    logits = jnp.asarray(random.standard_normal((rows, width)) * 2, jnp.float32)
    masks = jnp.asarray(packed(some_allowed(random, rows, width)))
    ours, theirs = (
        np.asarray(jax.jit(partial(draw, implementation=name))(logits, options(rows), EVERYTHING, masks))
        for name in ("native", "xla")
    )
    # Sums in another order may turn a draw that falls on a border.
    assert np.mean(ours == theirs) > 0.99
    greedy_rows = np.asarray(options(rows).temperature) == 0
    assert ours[greedy_rows].tolist() == theirs[greedy_rows].tolist()


def test_numbers_that_are_none_stay_in_their_rows(implementation: str) -> None:
    random = np.random.default_rng(5)
    logits = random.standard_normal((6, 300)).astype(np.float32)
    logits[1], logits[2], logits[3, ::2], logits[4, 7] = np.nan, -np.inf, np.nan, np.inf
    allowed = random.random((6, 300)) < 0.3
    allowed[4, 7] = True
    masks, choice = jnp.asarray(packed(allowed)), options(6)._replace(temperature=jnp.ones(6))
    run = jax.jit(partial(draw, implementation=implementation))
    got = np.asarray(run(logits, choice, EVERYTHING, masks))
    want = np.asarray(run(np.where(allowed, logits, -np.inf), choice, EVERYTHING))
    assert got.tolist() == want.tolist()
    assert ((got >= 0) & (got < 300)).all()
    assert got[4] == 7


def test_masks_of_another_size_are_refused(implementation: str) -> None:
    logits = jnp.zeros((2, 300))
    for wrong in (jnp.zeros((2, 9), jnp.int32), jnp.zeros((1, 10), jnp.int32), jnp.zeros((2, 10), jnp.uint32)):
        with pytest.raises(ValueError, match=r"need int32\[2, 10\]"):
            greedy(logits, wrong, implementation=implementation)
        with pytest.raises(ValueError, match=r"need int32\[2, 10\]"):
            draw(logits, options(2), EVERYTHING, wrong, implementation=implementation)


@needs_native
def test_the_kernel_refuses_masks_that_end_too_early() -> None:
    with pytest.raises(ValueError, match="9 words a row, and 300 logits need 10"):
        sampling.draw(jnp.zeros((2, 300)), options(2), 64, jnp.zeros((2, 9), jnp.int32))
    with pytest.raises(AssertionError, match="whole words"):
        sampling.draw(jnp.zeros((2, 300)), options(2), 16, jnp.zeros((2, 10), jnp.int32))


def test_a_bit_of_zero_is_minus_infinity() -> None:
    for width in (5, 32, 70):
        logits = jnp.arange(2 * width, dtype=jnp.float32).reshape(2, width)
        allowed = np.zeros((2, width), bool)
        allowed[0, [0, 3]] = allowed[1, -1] = True
        assert np.array_equal(np.isfinite(masked(logits, jnp.asarray(packed(allowed)))), allowed)
        free = masked(logits, jnp.full((2, mask_words(width)), -1, jnp.int32))
        assert np.array_equal(free, logits), "a row without a guide keeps every logit"
    assert masked(logits, None) is logits


def test_only_a_single_operation_may_stand_in_two_branches() -> None:
    logits = jnp.zeros((2, 300))
    assert not draws_in_one_call(logits, implementation="xla")
    assert draws_in_one_call(logits) == (unavailable_reason() is None)
