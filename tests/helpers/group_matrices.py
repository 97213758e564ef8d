"""Random matrices of four, six and eight bits in groups, and of codebooks, in the forms that products are tested with.

Where a form has no bits but `int4.CODES`, integers are indices of the codebook that belongs to the scales.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import on_guest
from helpers.thorough import by_default
from rekindle_kernels import int4

RANDOM = np.random.default_rng(0)
# Kernels that few files need: to compile them takes longer than the tests. For another processor they are there.
RARER = [] if on_guest.LEVEL in os.environ else [pytest.mark.slow]
_USUAL = [
    (4, 32, "float16", False), (4, 64, "float16", False), (4, 128, "float16", True), (4, 64, "float32", True),
    (8, 32, "float16", False), (8, 16, "float32", False), (8, 16, "float32", True), (8, 128, "float16", True),
    (4, 32, "int8", True), (4, 128, "int8", False), (8, 16, "int8", True), (8, 32, "int8", False),
    (4, 16, "int8", True), (6, 16, "int8", False), (6, 32, "int8", True), (int4.CODES, 32, int4.EXPONENTS, False),
]  # fmt: skip
_RARE = [
    (6, 32, "float16", False), (6, 64, "float32", True), (int4.CODES, 32, "float16", False),
    (int4.CODES, 32, "int8", False), (int4.CODES, 32, "float32", False), (int4.CODES, 16, "float32", False),
    (4, 16, "float32", True), (4, 16, "int8", False),
]  # fmt: skip
FORMS = [*_USUAL, *(pytest.param(*form, marks=RARER) for form in _RARE)]
# One of each number of bits and of each kind of scales: what takes every form apart alike needs no other by default.
_UNLIKE = {
    (4, 32, "float16", False), (4, 64, "float32", True), (4, 16, "int8", True), (6, 32, "int8", True),
    (8, 16, "float32", True), (8, 32, "int8", False), (int4.CODES, 32, int4.EXPONENTS, False), (None, 0, "", False),
}  # fmt: skip


def few(forms: Sequence[Any]) -> list[Any]:
    return by_default(forms, lambda form: type(form) is tuple and form in _UNLIKE)


FEW_FORMS = few(FORMS)
ONE_FORM = [_USUAL[0], *(pytest.param(*form, marks=pytest.mark.slow) for form in (*_USUAL[1:], *_RARE))]  # by default
Matrix = tuple[jax.Array, jax.Array, jax.Array | None]


def of_xla_and_native(forms: Sequence[Any]) -> list[Any]:
    """The forms with "xla" and with None, a few of them by default: a kernel takes longer to compile than to test."""
    return [pytest.param(name, *form.values, marks=form.marks) for name in ("xla", None) for form in few(forms)]


INDICES = (0, 1, 2, -1, -3, -4, 3, 2**31 - 1, -(2**31))  # of a stack of three, and others


def clamped(index: int) -> int:
    """Which of a stack of three `jax.lax.dynamic_index_in_dim` takes."""
    return int(jax.lax.dynamic_index_in_dim(jnp.arange(3), jnp.int32(index), keepdims=False))


def integers(*shape: int, bits: int = 4) -> np.ndarray:
    half = 1 << (bits - 1)
    return RANDOM.integers(0, 16, shape).astype(np.uint8) if bits == 4 else RANDOM.integers(-half, half, shape, np.int8)


def stored(scales: np.ndarray, kind: str, group: int) -> np.ndarray:
    """Scales [N, groups] as they are stored in this dtype, before they are packed."""
    if kind == int4.EXPONENTS:
        return np.rint(np.log2(scales + 1e-9) + 128).astype(np.uint8).view(kind)
    if kind != int4.STEPPED:
        return scales.astype(kind)
    grouped = scales.reshape(len(scales), -1, int4.SPAN // group)
    steps = (np.abs(grouped).max(-1) / 127).astype(np.float16)
    integers = np.rint(grouped / steps.astype(np.float64)[..., None]).clip(-127, 127).astype(np.int8)
    return int4.stepped(integers.reshape(scales.shape), steps)


def numbers(scales: np.ndarray) -> np.ndarray:
    if scales.dtype.name == int4.EXPONENTS:
        return np.ldexp(1.0, scales.view(np.uint8).astype(int) - 128)
    return (int4.stepped_numbers(scales) if scales.dtype == np.int8 else scales).astype(np.float64)


def matrix(
    outputs: int, inputs: int, group: int, kind: str = "float16", minimums: bool = False, bits: int | str = 4
) -> tuple[Matrix, np.ndarray]:
    """A random matrix and its values in float64."""
    shape = outputs, inputs // group
    if bits == int4.CODES:
        q, book = integers(outputs, inputs), np.array(int4.CODEBOOKS[kind], np.float64)
        scale = stored(RANDOM.random(shape) / (5 * book.max()), kind, group)
        weight = jnp.asarray(int4.pack(q).view(int4.CODES))
        values = np.repeat(numbers(scale), group, -1) * book[q]
        return (weight, jnp.asarray(int4.pack_scales(scale)), None), values
    assert isinstance(bits, int)
    q = integers(outputs, inputs, bits=bits)
    scale = stored(RANDOM.random(shape) / (2.5 * (1 << bits)), kind, group)
    minimum = stored(RANDOM.standard_normal(shape) / 5, kind, group) if minimums else None
    values = np.repeat(numbers(scale), group, -1) * (q - (0.0 if minimums or bits > 4 else 8.0))
    packed = None
    if minimum is not None:
        values += np.repeat(numbers(minimum), group, -1)
        packed = jnp.asarray(int4.pack_scales(minimum))
    return (jnp.asarray(int4.pack(q, bits)), jnp.asarray(int4.pack_scales(scale)), packed), values
