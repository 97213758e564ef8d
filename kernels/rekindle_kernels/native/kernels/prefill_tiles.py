"""Tiles of keys and values in a core's own cache, and the product of a tile's rows with them.

Axes: D head size, K kv heads, S page size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.kernels.attention_job import StoredHeads, addresses, vector_of
from rekindle_kernels.native.language.amx import add_products_of_pairs, load_tile, store_tile, zero_tile
from rekindle_kernels.native.language.dot_products import add_pairs, load_interleaved, store_columns
from rekindle_kernels.native.language.jit import emits, inline, jit
from rekindle_kernels.native.language.memory import LINE, WORD, f32, set_f32
from rekindle_kernels.native.language.vector import LANES, load_f32, multiply, multiply_add, splat, store, store_four

KEYS = 4 * LANES  # of a tile: the four vectors of the product
ZERO, ONE = np.float32(0), np.float32(1)


def loader(stored: StoredHeads, paired: bool) -> Any:
    """Return `load(job, s, k, begin, since, until, keys, values)`: loads the tile of prompt s that starts at key
    `begin`.

    Keys before `since` and from `until` on are zeros and are not read: their pages may be anyone's, and 0 · NaN is NaN.
    """
    return load_pairs(stored) if paired else load_floats(stored)


def load_floats(stored: StoredHeads) -> Any:
    """Return keys [D, KEYS] and values [KEYS, D] as float32."""
    read_key, read_value, load_key, load_value = (
        stored.keys.read,
        stored.values.read,
        stored.keys.load,
        stored.values.load,
    )
    D, scaled, (key_at, value_at) = stored.head_dim, stored.scaled, addresses(stored)

    @inline
    def scale_of(job: Any, s: int, t: int, part: int, k: int) -> float:
        return f32(job.scales, vector_of(job, s, t, part, k)) if scaled else ONE

    @inline
    def load_one(job: Any, s: int, k: int, t: int, j: int, keys: int, values: int) -> None:
        """Load one key and its value, number by number."""
        key, value = key_at(job, s, t, k), value_at(job, s, t, k)
        key_scale, value_scale = scale_of(job, s, t, 0, k), scale_of(job, s, t, 1, k)
        for d in range(D):
            set_f32(values, j * D + d, read_value(value, d) * value_scale)
        for d in range(D):
            set_f32(keys, d * KEYS + j, read_key(key, d) * key_scale)

    @inline
    def load_values(job: Any, s: int, k: int, t: int, target: int) -> None:
        value, scale = value_at(job, s, t, k), splat(scale_of(job, s, t, 1, k))
        for d in range(0, D, LANES):
            store(target, d, multiply(load_value(value, d), scale))

    @jit
    def load_tile(job: Any, s: int, k: int, begin: int, since: int, until: int, keys: int, values: int) -> None:
        for j in range(0, KEYS, 4):
            t = begin + j
            if since <= t and t + 4 <= until:
                for i in range(4):
                    load_values(job, s, k, t + i, values + (j + i) * D * 4)
                a, b, c, e = (
                    key_at(job, s, t, k),
                    key_at(job, s, t + 1, k),
                    key_at(job, s, t + 2, k),
                    key_at(job, s, t + 3, k),
                )
                a_scale, b_scale = splat(scale_of(job, s, t, 0, k)), splat(scale_of(job, s, t + 1, 0, k))
                c_scale, e_scale = splat(scale_of(job, s, t + 2, 0, k)), splat(scale_of(job, s, t + 3, 0, k))
                for d in range(0, D, LANES):
                    store_columns(
                        keys + (d * KEYS + j) * 4,
                        KEYS,
                        multiply(load_key(a, d), a_scale),
                        multiply(load_key(b, d), b_scale),
                        multiply(load_key(c, d), c_scale),
                        multiply(load_key(e, d), e_scale),
                    )
            else:
                for i in range(j, j + 4):
                    if since <= begin + i < until:
                        load_one(job, s, k, begin + i, i, keys, values)
                    else:
                        for d in range(D):
                            set_f32(values, i * D + d, ZERO)
                            set_f32(keys, d * KEYS + i, ZERO)

    return load_tile


def load_pairs(stored: StoredHeads) -> Any:
    """Return keys as words [D / 2, KEYS] of two bfloat16 of a key, values as words [KEYS / 2, D] of two values."""
    D, (key_at, _) = stored.head_dim, addresses(stored)

    @jit
    def load_tile(job: Any, s: int, k: int, begin: int, since: int, until: int, keys: int, values: int) -> None:
        heads = job.kv_heads * job.page_size * D * 2
        zeros = values + KEYS * D * 2  # after the values: a row of zeros
        for d in range(0, D, 2 * LANES):
            store(zeros, d // 2, splat(ZERO))
        for j in range(0, KEYS, 4):
            t = begin + j
            a_seen, b_seen = since <= t < until, since <= t + 1 < until
            c_seen, e_seen = since <= t + 2 < until, since <= t + 3 < until
            a = key_at(job, s, t, k) if a_seen else zeros
            b = key_at(job, s, t + 1, k) if b_seen else zeros
            c = key_at(job, s, t + 2, k) if c_seen else zeros
            e = key_at(job, s, t + 3, k) if e_seen else zeros
            for i in range(0, D // 2, LANES):
                store_columns(
                    keys + (i * KEYS + j) * 4, KEYS, load_f32(a, i), load_f32(b, i), load_f32(c, i), load_f32(e, i)
                )
            a = a + heads if a_seen else zeros
            b = b + heads if b_seen else zeros
            c = c + heads if c_seen else zeros
            e = e + heads if e_seen else zeros
            for d in range(0, D, LANES):
                store(values, j // 2 * D + d, load_interleaved(a, b, d))
                store(values, (j // 2 + 1) * D + d, load_interleaved(c, e, d))

    return load_tile


@inline
def add_product_of_floats(a: Any, b: Any, c: Any) -> Any:
    """a + b · c in every lane."""
    return multiply_add(b, c, a)


def products(paired: bool) -> Any:
    """Return `product` of four rows with four vectors, and `row_vector` of one row with one vector, in words of two
    bfloat16 or of one float32."""
    add_product = add_pairs if paired else add_product_of_floats
    wide = has_feature("avx512f") or paired  # else sixteen registers of half the size, or on Arm 32 of a quarter

    @inline
    def load_four(c: int, at: int) -> tuple[Any, Any, Any, Any]:
        return load_f32(c, at), load_f32(c, at + LANES), load_f32(c, at + 2 * LANES), load_f32(c, at + 3 * LANES)

    @inline
    def add_four(
        a: int, i: int, b0: Any, b1: Any, b2: Any, b3: Any, r0: Any, r1: Any, r2: Any, r3: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Add the products of a word of a with four vectors of b."""
        x = splat(f32(a, i))
        return add_product(r0, b0, x), add_product(r1, b1, x), add_product(r2, b2, x), add_product(r3, b3, x)

    @inline
    def product(a: int, a_step: int, b: int, b_step: int, depth: int, c: int, c_step: int, add: bool) -> None:
        """c (+)= a · b for four rows of a and four vectors of b; steps count floats from row to row."""
        r00 = r01 = r02 = r03 = r10 = r11 = r12 = r13 = splat(ZERO)
        r20 = r21 = r22 = r23 = r30 = r31 = r32 = r33 = splat(ZERO)
        if add:
            r00, r01, r02, r03 = load_four(c, 0)
            r10, r11, r12, r13 = load_four(c, c_step)
            r20, r21, r22, r23 = load_four(c, 2 * c_step)
            r30, r31, r32, r33 = load_four(c, 3 * c_step)
        for i in range(depth):
            b0, b1, b2, b3 = load_four(b, i * b_step)
            r00, r01, r02, r03 = add_four(a, i, b0, b1, b2, b3, r00, r01, r02, r03)
            r10, r11, r12, r13 = add_four(a, a_step + i, b0, b1, b2, b3, r10, r11, r12, r13)
            r20, r21, r22, r23 = add_four(a, 2 * a_step + i, b0, b1, b2, b3, r20, r21, r22, r23)
            r30, r31, r32, r33 = add_four(a, 3 * a_step + i, b0, b1, b2, b3, r30, r31, r32, r33)
        store_four(c, 0, r00, r01, r02, r03)
        store_four(c, c_step, r10, r11, r12, r13)
        store_four(c, 2 * c_step, r20, r21, r22, r23)
        store_four(c, 3 * c_step, r30, r31, r32, r33)

    @inline
    def by_vector(a: int, a_step: int, b: int, b_step: int, depth: int, c: int, c_step: int, add: bool) -> None:
        """c (+)= a · b for four rows of a and one vector of b."""
        r0 = r1 = r2 = r3 = splat(ZERO)
        if add:
            r0, r1 = load_f32(c, 0), load_f32(c, c_step)
            r2, r3 = load_f32(c, 2 * c_step), load_f32(c, 3 * c_step)
        for i in range(depth):
            x = load_f32(b, i * b_step)
            r0, r1 = add_product(r0, x, splat(f32(a, i))), add_product(r1, x, splat(f32(a, a_step + i)))
            r2 = add_product(r2, x, splat(f32(a, 2 * a_step + i)))
            r3 = add_product(r3, x, splat(f32(a, 3 * a_step + i)))
        store(c, 0, r0)
        store(c, c_step, r1)
        store(c, 2 * c_step, r2)
        store(c, 3 * c_step, r3)

    @inline
    def product_by_vectors(
        a: int, a_step: int, b: int, b_step: int, depth: int, c: int, c_step: int, add: bool
    ) -> None:
        """c (+)= a · b, one vector of b at a time, where registers do not hold the sums of four."""
        for column in range(0, 4 * LANES, LANES):
            by_vector(a, a_step, b + column * 4, b_step, depth, c + column * 4, c_step, add)

    @inline
    def row_vector(a: int, b: int, b_step: int, depth: int, c: int) -> None:
        """c += a · b for one row and one vector: for head sizes that four vectors do not divide."""
        x = load_f32(c, 0)
        for i in range(depth):
            x = add_product(x, load_f32(b, i * b_step), splat(f32(a, i)))
        store(c, 0, x)

    return product if wide else product_by_vectors, row_vector


# The products of `prefill` by AMX: sixteen rows of queries times a tile of keys, and their weights times its values.
#
# Tile registers multiply words of two bfloat16 as `prefill_tiles` lays them out, and leave float32. They add the
# products of a row in another order than `dot_products.add_pairs`, so the last bits differ from those without AMX. A
# row's result is the same whatever the other rows are.

AMX_ROWS = 16  # that are multiplied together
_SUMS = KEYS // LANES  # registers of sums
_ROWS_AT, _COLUMNS_AT = 4, 5  # registers: words of rows, and one of two for words of columns


def amx_products(D: int) -> tuple[Any, Any]:
    """Return `by_keys(q, keys, logits)` and `by_values(weights, values, out)`, which adds to `out`; heads have that
    size."""

    def multiply(builder: Any, rows: Any, row: int, columns: Any, column: int, depth: int, sums: list[int]) -> None:
        """Adds the products of `depth` words of sixteen rows; `row` and `column` are the bytes of one of each."""
        for i in range(depth // LANES):
            load_tile(builder, _ROWS_AT, builder.add(rows, WORD(i * LINE)), WORD(row))
            for number, behind in enumerate(sums):
                place = builder.add(columns, WORD(i * LANES * column + behind))
                register = _COLUMNS_AT + number % 2
                load_tile(builder, register, place, WORD(column))
                add_products_of_pairs(builder, number, _ROWS_AT, register)

    @emits(types.void, *[types.int64] * 3)
    def by_keys(builder: Any, q: Any, keys: Any, logits: Any) -> None:
        for number in range(_SUMS):
            zero_tile(builder, number)
        multiply(builder, q, 2 * D, keys, 4 * KEYS, D // 2, [number * LINE for number in range(_SUMS)])
        for number in range(_SUMS):
            store_tile(builder, number, builder.add(logits, WORD(number * LINE)), WORD(4 * KEYS))

    @emits(types.void, *[types.int64] * 3)
    def by_values(builder: Any, weights: Any, values: Any, out: Any) -> None:
        for first in range(0, 4 * D, _SUMS * LINE):
            places = list(range(first, min(4 * D, first + _SUMS * LINE), LINE))
            for number, place in enumerate(places):
                load_tile(builder, number, builder.add(out, WORD(place)), WORD(4 * D))
            multiply(builder, weights, 4 * KEYS, values, 4 * D, KEYS // 2, places)
            for number, place in enumerate(places):
                store_tile(builder, number, builder.add(out, WORD(place)), WORD(4 * D))

    return by_keys, by_values
