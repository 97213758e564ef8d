"""The products of `prefill` by AMX: sixteen rows of queries times a tile of keys, and their weights times its values.

Tile registers multiply words of two bfloat16 as `prefill_tiles` lays them out, and leave float32. They add the products
of a row in another order than `dot_products.add_pairs`, so the last bits differ from those without AMX. A row's result
is the same whatever rows are beside it.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from rekindle_kernels.native.kernels.prefill_tiles import KEYS
from rekindle_kernels.native.language.amx import (
    add_products_of_pairs,
    configuration,
    configure,
    load_tile,
    store_tile,
    zero_tile,
)
from rekindle_kernels.native.language.jit import jit
from rekindle_kernels.native.language.memory import LINE, WORD, set_word
from rekindle_kernels.native.language.vector import LANES

ROWS = 16
MEMORY = 2 * LINE  # bytes that keep the shapes of the tile registers, and those of before
_SUMS = KEYS // LANES  # registers of sums
_ROWS_AT, _COLUMNS_AT = 4, 5  # registers: words of rows, and one of two for words of columns


@jit
def begin(memory: int) -> None:
    """Shape all tile registers as sixteen rows of a cache line; `memory` keeps how they were."""
    for index in range(8):
        set_word(memory, index, 0)
    lines = 0x40004000400040
    set_word(memory, 0, 1)
    set_word(memory, 2, lines)
    set_word(memory, 3, lines)
    set_word(memory, 6, 0x1010101010101010)
    configuration(memory + LINE)
    configure(memory)


@jit
def end(memory: int) -> None:
    """Leave the tile registers as they were."""
    configure(memory + LINE)


def products(D: int) -> tuple[Any, Any]:
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

    @intrinsic
    def by_keys(typing_context: Any, q: Any, keys: Any, logits: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            q, keys, logits = args
            for number in range(_SUMS):
                zero_tile(builder, number)
            multiply(builder, q, 2 * D, keys, 4 * KEYS, D // 2, [number * LINE for number in range(_SUMS)])
            for number in range(_SUMS):
                store_tile(builder, number, builder.add(logits, WORD(number * LINE)), WORD(4 * KEYS))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    @intrinsic
    def by_values(typing_context: Any, weights: Any, values: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, values, out = args
            for first in range(0, 4 * D, _SUMS * LINE):
                places = list(range(first, min(4 * D, first + _SUMS * LINE), LINE))
                for number, place in enumerate(places):
                    load_tile(builder, number, builder.add(out, WORD(place)), WORD(4 * D))
                multiply(builder, weights, 4 * KEYS, values, 4 * D, KEYS // 2, places)
                for number, place in enumerate(places):
                    store_tile(builder, number, builder.add(out, WORD(place)), WORD(4 * D))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return by_keys, by_values
