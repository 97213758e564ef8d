"""The memory and the work of a training, before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rekindle._src.capabilities.tuning.sites import TrainedMatrix
from rekindle._src.capabilities.tuning.step import TrainingShape
from rekindle._src.core import memory, words
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.differentiable import AT_ONCE
from rekindle.errors import OutOfMemory

_ARRAYS = 6  # of the adapter's size: its numbers twice, gradients, two moments, and a copy in host memory
_INSIDE = 3  # arrays of a layer's widths that are alive at once in its backward pass


class TrainingNeed(NamedTuple):
    """The bytes that a training takes in addition to the open model, and the work of its largest micro-batch."""

    adapter: int
    inputs: int  # of all layers, which are kept for the backward pass
    layer: int  # inside of one layer
    head: int
    operations: float  # in the products of a micro-batch, forward, again and back

    @property
    def total(self) -> int:
        """All of it."""
        return self.adapter + self.inputs + max(self.layer, self.head)

    def __str__(self) -> str:
        return (
            f"{words.mebibytes(self.total)}: {words.mebibytes(self.adapter)} for the adapter and its optimiser, "
            f"{words.mebibytes(self.inputs)} for the inputs of layers, {words.mebibytes(max(self.layer, self.head))} "
            "for one layer or the head"
        )


def need_of(
    config: ModelConfig, matrices: Sequence[TrainedMatrix], rank: int, shape: TrainingShape, parameters: int
) -> TrainingNeed:
    """Return the needs of a training in micro-batches of this shape. `parameters` are the model's."""
    tokens = shape.rows * shape.tokens
    widths: dict[int, int] = {}
    for matrix in matrices:
        widths[matrix.layer] = widths.get(matrix.layer, 0) + matrix.site.inputs + matrix.site.outputs
    attention = 4 * shape.rows * config.num_heads * shape.tokens**2 * _INSIDE
    return TrainingNeed(
        4 * _ARRAYS * sum(matrix.parameters(rank) for matrix in matrices),
        4 * tokens * config.hidden_size * (config.num_layers + 2),
        4 * tokens * max(widths.values()) * _INSIDE + attention + 2 * AT_ONCE,
        4 * shape.chosen * config.vocab_size * _INSIDE + 2 * AT_ONCE,
        6.0 * parameters * tokens,
    )


def check_room(need: TrainingNeed, shape: TrainingShape) -> None:
    """Raise OutOfMemory if a training does not fit into the memory that is free."""
    free = memory.available()
    if free is not None and not memory.fits(need.total):
        raise OutOfMemory(
            f"Training needs {need}, with {words.count(shape.rows, 'row')} of {shape.tokens} tokens at a time, and "
            f"{words.mebibytes(free)} are free. Pass shorter examples, a smaller rank, or targets=['q_proj', 'v_proj']."
        )
