"""The tensors that a GGUF file stores in another form than a folder, as families state it."""

from __future__ import annotations

from typing import NamedTuple


class HeadOrder(NamedTuple):
    """Heads in `groups`: a file has one head of each group in turn, where a folder has one group after another."""

    first: int  # rows, or columns, before the first head
    groups: int
    heads: int
    size: int  # rows, or columns, of each


class TensorRewrite(NamedTuple):
    """The difference of a GGUF file's tensor from Hugging Face's."""

    shape: tuple[int, ...] | None = None  # Hugging Face's: the file has the same numbers with other axes
    rows: HeadOrder | None = None
    columns: HeadOrder | None = None
    logarithm: bool = False  # the file has -exp(x)
    negative: bool = True  # or exp(x) otherwise

    @property
    def plain(self) -> bool:
        """True if the numbers are the same, in the same order."""
        return self.rows is None and self.columns is None and not self.logarithm
