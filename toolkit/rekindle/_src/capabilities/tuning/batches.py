"""The micro-batches of a step: lines as rows of one length, in few shapes, so that few programs serve all steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.tuning.data import Line
from rekindle._src.capabilities.tuning.step import TrainingShape
from rekindle._src.core.records import IntArray

SHORTEST = 16  # tokens of a row
_MOST_TOKENS = 1024  # of a micro-batch, if a row is no longer
_OPERATIONS = 4e10  # in the passes of a layer: a fifth of a second on two cores
_LOGITS = 32 << 20  # bytes of the logits that are computed at once


class MicroBatch(NamedTuple):
    """Rows of one shape, and their learned tokens. Rows without a line are padding."""

    shape: TrainingShape
    lines: tuple[int, ...]  # of the step
    tokens: IntArray  # [R, T]
    lengths: IntArray  # [R]
    counts: tuple[int, ...]  # learned tokens of each line
    places: IntArray  # [learned tokens, with padding up to a multiple of C]: rows of hidden states before them
    targets: IntArray  # the same


def length_for(count: int) -> int:
    """Return the tokens of a row for a line: a power of two, or one and a half of one."""
    size = max(SHORTEST, 1 << (count - 1).bit_length())
    return size * 3 // 4 if size > SHORTEST and count <= size * 3 // 4 else size


class BatchPlan(NamedTuple):
    """How lines become micro-batches."""

    tokens: int  # of a micro-batch
    chosen: int  # C
    most: int  # rows
    unit: int = 1  # lines that stay together

    @classmethod
    def of(cls, layer_parameters: int, vocab_size: int, most: int, unit: int = 1) -> BatchPlan:
        """Return the plan for a model, by the parameters of its largest layer."""
        tokens = _power(int(_OPERATIONS / (6 * max(1, layer_parameters))))
        chosen = _power(_LOGITS // (4 * vocab_size))
        return cls(min(_MOST_TOKENS, max(64, tokens)), min(512, max(16, chosen)), most, unit)

    def shape(self, length: int) -> TrainingShape:
        """Return the shape for lines of up to this many tokens."""
        tokens = length_for(length)
        rows = max(self.unit, min(self.most, self.tokens // tokens) // self.unit * self.unit)
        return TrainingShape(rows, tokens, self.chosen)

    def batches(self, lines: Sequence[Line]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a step's lines, the longest lines first."""
        units = [range(start, start + self.unit) for start in range(0, len(lines), self.unit)]
        waiting = sorted(units, key=lambda unit: -max(len(lines[index].ids) for index in unit))
        while waiting:
            shape = self.shape(max(len(lines[index].ids) for index in waiting[0]))
            count = shape.rows // self.unit
            yield _batch(shape, [index for unit in waiting[:count] for index in unit], lines)
            waiting = waiting[count:]


def _power(value: int) -> int:
    return 1 << max(0, value.bit_length() - 1)


def _batch(shape: TrainingShape, chosen: Sequence[int], lines: Sequence[Line]) -> MicroBatch:
    tokens, lengths = np.zeros((shape.rows, shape.tokens), np.int32), np.ones(shape.rows, np.int32)
    places: list[NDArray[np.int64]] = []
    for row, index in enumerate(chosen):
        ids, learned = lines[index]
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        places.append(np.flatnonzero(learned[1:]) + row * shape.tokens)
    before = np.concatenate(places)
    padded = np.zeros(-(-len(before) // shape.chosen) * shape.chosen, np.int32)
    padded[: len(before)] = before
    targets = tokens.reshape(-1)[np.minimum(padded + 1, tokens.size - 1)]
    counts = tuple(map(len, places))
    return MicroBatch(shape, tuple(chosen), tokens, lengths, counts, padded, targets.astype(np.int32))


def order_of(count: int, size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the items of each step without end: each time that all have been seen, in another order."""
    random = np.random.default_rng(seed)
    waiting = np.zeros(0, np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, random.permutation(count)])
        yield waiting[:size]
        waiting = waiting[size:]
