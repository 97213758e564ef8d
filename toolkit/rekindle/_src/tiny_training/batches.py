"""Training batches: documents packed into windows of one length, equal in every run for the same step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rekindle._src.tiny_training.corpus import END, TRAIN, documents
from rekindle._src.tiny_training.recipe import Recipe
from rekindle._src.tiny_training.tokenizer import token_id

PAD = -1  # fills the end of a window; its loss does not count
POOL = 24  # documents considered for a gap


def encoded(tokenizer: Tokenizer, seed: str, copying: float = 0.0, sheets: float = 0.0) -> Iterator[list[int]]:
    """Yield the documents of a stream as token ids, each followed by the end token."""
    end = token_id(tokenizer, END)
    stream = documents(seed, copying, sheets)
    while True:
        for encoding in tokenizer.encode_batch(list(islice(stream, POOL))):
            yield [*encoding.ids, end]


def pack(stream: Iterator[list[int]], rows: int, length: int) -> NDArray[np.int32]:
    """Return windows [rows, length] of whole documents; documents wait in a pool until one fits, and the rest is PAD.

    Every window begins with the beginning of a document, as a prompt does. Only documents longer than a window are
    cut.
    """
    windows = np.full((rows, length), PAD, np.int32)
    pool: list[list[int]] = []
    for window in windows:
        used = 0
        while True:
            pool.extend(islice(stream, POOL - len(pool)))
            fitting = next((i for i, ids in enumerate(pool) if len(ids) <= length - used), None)
            if fitting is None and used:
                break
            ids = pool.pop(fitting or 0)[: length - used]
            window[used : used + len(ids)] = ids
            used += len(ids)
            if used == length:
                break
    return windows


def batch(tokenizer: Tokenizer, recipe: Recipe, step: int) -> NDArray[np.int32]:
    """Return the windows [rows, length + 1] of a training step: inputs and, shifted by one, targets."""
    stage = recipe.stage(step)
    return pack(encoded(tokenizer, f"{TRAIN} {step}", stage.copying, stage.sums), stage.rows, stage.length + 1)
