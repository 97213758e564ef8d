"""Tensors that a file has in another form: rows and columns in another order, logarithms, two matrices for one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.blocks import BY_NAME
from rekindle._src.models.loading.gguf.rewrites import HeadOrder, TensorRewrite
from rekindle._src.models.loading.gguf.rows import GgufRows, JoinedRows, RewrittenRows, entry_of, joined, stored_places
from rekindle._src.models.loading.tensor_files import TensorEntry

ORDER = HeadOrder(first=5, groups=2, heads=6, size=4)  # 5 rows, then 6 heads of 4
ROWS, COLUMNS = 29, 64
KINDS = ("F32", "F16", "Q8_0", "Q4_0")


def write(path: Path, kind: str, rows: int, columns: int, name: str = "stored") -> TensorEntry:
    """A tensor of random numbers as a file."""
    random, layout = np.random.default_rng(rows), BY_NAME[kind].layout
    blocks = np.zeros(rows * columns // BY_NAME[kind].values, layout)
    if kind in ("F32", "F16"):
        blocks = random.standard_normal(rows * columns).astype(layout)
    else:
        blocks = np.frombuffer(random.integers(0, 128, blocks.nbytes, np.uint8).tobytes(), layout).copy()
        blocks["scale"] = random.random(len(blocks)).astype(np.float16)
    path.write_bytes(blocks.tobytes())
    return TensorEntry(name, path, kind, (rows, columns), 0, blocks.nbytes)


def rows_of(entry: TensorEntry) -> GgufRows:
    return GgufRows(entry.file, entry.name, BY_NAME[entry.dtype], entry.shape, entry.offset)


def grouped(array: NDArray[np.float32], order: HeadOrder) -> NDArray[np.float32]:
    """Return the rows of a file group after group; in the file, heads are one of each group in turn."""
    heads = array[order.first :].reshape(order.heads // order.groups, order.groups, order.size, -1)
    return np.concatenate([array[: order.first], heads.swapaxes(0, 1).reshape(-1, array.shape[1])])


@pytest.mark.parametrize("kind", KINDS)
def test_heads_come_in_the_order_of_folders(kind: str, tmp_path: Path) -> None:
    stored = write(tmp_path / "tensor", kind, ROWS, COLUMNS)
    read = entry_of("ours", stored, TensorRewrite(rows=ORDER)).rows
    assert isinstance(read, RewrittenRows)
    whole = rows_of(stored)
    expected = grouped(whole(0, ROWS), ORDER)
    np.testing.assert_array_equal(read(0, ROWS), expected)
    np.testing.assert_array_equal(np.concatenate([read(0, 7), read(7, 20), read(20, ROWS)]), expected)
    assert read.packing == whole.packing
    if whole.packing is not None:
        places = stored_places(np.arange(3, ROWS), ORDER)
        ours, theirs = read.integers(3, ROWS), whole.integers(0, ROWS)
        np.testing.assert_array_equal(ours.integers, theirs.integers[places])
        np.testing.assert_array_equal(ours.scales, theirs.scales[places])


def test_columns_are_read_as_numbers(tmp_path: Path) -> None:
    order = HeadOrder(first=0, groups=4, heads=8, size=8)
    stored = write(tmp_path / "tensor", "Q8_0", ROWS, COLUMNS)
    read = entry_of("ours", stored, TensorRewrite(columns=order)).rows
    assert isinstance(read, RewrittenRows)
    np.testing.assert_array_equal(read(2, 9), grouped(rows_of(stored)(2, 9).T, order).T)
    assert read.packing is None


def test_rates_are_logarithms_and_axes_are_those_of_folders(tmp_path: Path) -> None:
    values = np.linspace(-1, 2, 6, dtype=np.float32)
    (tmp_path / "rates").write_bytes((-np.exp(values)).tobytes())
    stored = TensorEntry("stored", tmp_path / "rates", "F32", (6, 1), 0, 24)
    entry = entry_of("ours", stored, TensorRewrite((6,), logarithm=True))
    assert entry.shape == (6,) and entry.rows is not None
    np.testing.assert_allclose(entry.rows(1, 5), values[1:5], rtol=1e-6)
    plain = entry_of("ours", stored, TensorRewrite((6,)))
    assert (plain.shape, plain.rows) == ((6,), None), "the same numbers are read as they are stored"
    assert entry_of("ours", stored, TensorRewrite((7,))).shape == (6, 1), "a wrong shape is reported where all are"


@pytest.mark.parametrize(("first", "second"), [("Q8_0", "Q8_0"), ("Q8_0", "Q4_0"), ("F32", "F32")])
def test_two_matrices_are_one(first: str, second: str, tmp_path: Path) -> None:
    parts = [write(tmp_path / "gate", first, 6, COLUMNS, "gate"), write(tmp_path / "up", second, 10, COLUMNS, "up")]
    entry = joined("ours", parts)
    assert entry is not None and isinstance(entry.rows, JoinedRows)
    assert entry.shape == (16, COLUMNS)
    expected = np.concatenate([rows_of(parts[0])(0, 6), rows_of(parts[1])(0, 10)])
    np.testing.assert_array_equal(np.concatenate([entry.rows(0, 4), entry.rows(4, 9), entry.rows(9, 16)]), expected)
    packing = entry.rows.packing
    assert packing == (rows_of(parts[0]).packing if first == second else None)
    if packing is not None:
        assert len(entry.rows.integers(4, 9).integers) == 5
    assert joined("ours", [parts[0], parts[1]._replace(shape=(10, COLUMNS // 2))]) is None


def test_stacks_are_joined_matrix_by_matrix(tmp_path: Path) -> None:
    parts = [write(tmp_path / name, "F16", 12, 8)._replace(shape=(3, 4, 8)) for name in ("gate", "up")]
    entry = joined("ours", parts)
    assert entry is not None and isinstance(entry.rows, JoinedRows)
    assert entry.shape == (3, 8, 8)
    both = [rows_of(part)(1, 3) for part in parts]
    np.testing.assert_array_equal(entry.rows(1, 3), np.concatenate(both, axis=1))
