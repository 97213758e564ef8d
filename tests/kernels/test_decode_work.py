"""The work table of GPU decode: every block of keys belongs to one item, and items are about equally large."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rekindle_kernels.pallas.gpu import decode
from rekindle_kernels.tuning import GpuDecode

CONFIG = GpuDecode(block_k=16, num_warps=4, num_stages=3, least_blocks=2)


def check(lengths: list[int], extra: int, window: int | None = None) -> np.ndarray:
    """The sizes of the items in blocks, after looking at all of them."""
    work_table = jax.jit(partial(decode.work_table, sliding_window=window, config=CONFIG, extra=extra))
    table = work_table(jnp.array(lengths, jnp.int32))
    items, starts = np.asarray(table.items), np.asarray(table.starts)
    assert items.shape == (4, len(lengths) + extra) and starts.shape == (len(lengths) + 1,)
    assert starts[0] == 0 and starts[-1] <= len(lengths) + extra, "more items than there are programs"
    for row, length in enumerate(lengths):
        mine = items[:, starts[row] : starts[row + 1]]
        assert mine.shape[1] >= 1 and (mine[decode.ROW] == row).all()
        assert mine[decode.LEADS].tolist() == [1] + [0] * (mine.shape[1] - 1)
        first = 0 if window is None else max(length - window, 0) // CONFIG.block_k
        blocks = [at for begin, end in mine[[decode.BEGIN, decode.END]].T for at in range(begin, end)]
        assert blocks == list(range(first, -(-length // CONFIG.block_k)))
    left = items[:, starts[-1] :]
    assert (left[decode.BEGIN] >= left[decode.END]).all() and not left[decode.LEADS].any(), "left over, but not idle"
    assert (items[decode.ROW] < len(lengths)).all()
    return np.maximum(items[decode.END] - items[decode.BEGIN], 0)


@pytest.mark.parametrize("window", [None, 100])
def test_every_block_of_keys_belongs_to_one_item(window: int | None) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):  # each compiles
        rows = int(rng.integers(1, 9))
        lengths = (rng.integers(0, 3, rows) * rng.integers(0, 900, rows)).tolist()
        check(lengths, int(rng.integers(0, 20)), window)


def test_one_long_row_among_short_ones_is_divided() -> None:
    sizes = check([32768] + [64] * 63, extra=33)
    assert sizes.max() <= -(-(2048 + 63 * 4) // 33)
    assert sizes.max() < 2048 / 25


def test_rows_of_one_length_are_divided_only_where_there_are_few() -> None:
    assert check([4096] * 64, extra=33).max() == 256
    assert check([4096] * 4, extra=33).max() == -(-4 * 256 // 33)


def test_short_rows_are_not_divided_at_all() -> None:
    assert np.count_nonzero(check([20] * 3, extra=30)) == 3
