"""Kept weights that are brought into memory ahead: the same checksums and bytes, and a lease that is given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rekindle._src.models.loading import kept_weights, tensor_files

BLOCK = 1 << 18  # bytes


def written(path: Path, sizes: list[int]) -> tensor_files.Header:
    """A file of tensors of these sizes in bytes."""
    rng = np.random.default_rng(0)
    arrays = {f"t{index}": rng.integers(-128, 128, size, np.int8) for index, size in enumerate(sizes)}
    tensor_files.write(path, arrays, arrays.values())
    return tensor_files.read_header(path)


@pytest.mark.parametrize(
    "sizes",
    [
        [8],
        [3 * BLOCK + 64, 64, BLOCK, 2 * BLOCK - 8],
        [BLOCK, 0, 64],
        [64, 3, 128],  # the last one begins in the middle of a word
        [5],
        [],
    ],
    ids=str,
)
def test_checksums_of_a_file_are_those_of_its_tensors(sizes: list[int], tmp_path: Path) -> None:
    header = written(tmp_path / "tensors", sizes)
    content = np.fromfile(header.file, np.uint8)
    found = kept_weights.checksums_of(header.entries, content)
    lying = tensor_files.views(header, content)
    assert found == {name: kept_weights.checksum_of(array) for name, array in lying.items()}


def test_a_flipped_bit_changes_one_checksum(tmp_path: Path) -> None:
    header = written(tmp_path / "tensors", [BLOCK + 64, 512, 64])
    content = np.fromfile(header.file, np.uint8)
    before = kept_weights.checksums_of(header.entries, content)
    content[header.entries[1].offset + 100] ^= 4
    after = kept_weights.checksums_of(header.entries, content)
    assert [name for name in before if before[name] != after[name]] == ["t1"]


def test_what_was_brought_is_the_file(tmp_path: Path) -> None:
    header = written(tmp_path / "tensors", [BLOCK, 64])
    mapped = kept_weights.map_it(header)
    assert mapped is not None
    try:
        brought = kept_weights.bring(mapped)
        assert bytes(mapped.content) == header.file.read_bytes()
        assert brought.sums.keys() == {"t0", "t1"}
    finally:
        mapped.release()
        mapped.release()
    with header.file.open("r+b"):  # which a lease that is still held would delay
        pass
