"""The matrix that makes keys and values of latent vectors, of the two stacks that GGUF files have in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.blocks import BY_NAME
from rekindle._src.models.loading.gguf.rows import GgufRows
from rekindle._src.models.loading.tensor_files import TensorEntry

WHOLE, KEYS, VALUES = "attn_kv_b", "attn_k_b", "attn_v_b"


@dataclasses.dataclass(frozen=True, slots=True)
class LatentHeads:
    """Rows of each head's keys, then of its values, of a matrix for each that is [rank, size] and [size, rank].

    Called with a range of rows, it returns their values.
    """

    keys: GgufRows  # [heads, rank, size of a key]
    values: GgufRows  # [heads, size of a value, rank]

    @property
    def of_head(self) -> int:
        """The rows of a head."""
        return self.keys.shape[2] + self.values.shape[1]

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the values of the rows [start, stop)."""
        size, parts = self.of_head, []
        for head in range(start // size, -(-stop // size)):
            both = [self.keys(head, head + 1)[0].T, self.values(head, head + 1)[0]]
            parts.append(np.concatenate(both)[max(0, start - head * size) : stop - head * size])
        return np.ascontiguousarray(np.concatenate(parts))


def entry_of(name: str, place: str, stored: Mapping[str, TensorEntry]) -> tuple[TensorEntry, tuple[str, str]] | None:
    """Return the entry of the matrix `name`, whose place is "blk.0.attn_kv_b.weight", and the names of the stacks.

    None if the file does not have the stacks, or as ones that don't belong together.
    """
    stacks = place.replace(WHOLE, KEYS), place.replace(WHOLE, VALUES)
    keys, values = (stored.get(stack) for stack in stacks)
    if keys is None or values is None or len(keys.shape) != 3 or len(values.shape) != 3:
        return None
    if (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        return None
    key_rows, value_rows = (
        GgufRows(entry.file, stack, BY_NAME[entry.dtype], entry.shape, entry.offset)
        for stack, entry in zip(stacks, (keys, values), strict=True)
    )
    rows = LatentHeads(key_rows, value_rows)
    shape = (keys.shape[0] * rows.of_head, keys.shape[1])
    return keys._replace(name=name, shape=shape, nbytes=keys.nbytes + values.nbytes, rows=rows), stacks
