"""Run the plain loop of a model with two programs, and keep its texts, so that none is computed twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle._src.models.base import LoadedModel
from workshop import reference

BLOCK = 16  # tokens of a prompt at once, as far as they go
_said: dict[tuple[int, int, tuple[int, ...]], tuple[LoadedModel, list[int]]] = {}  # with the model, which keeps its id


def plain_loop(model: LoadedModel, prompt: Sequence[int], count: int = 24, *, context: int = 512) -> list[int]:
    """The greedy continuation of `prompt`, over a cache of `context` tokens.

    `reference.generate` has a cache of just the size, and so compiles for each length of prompt and text.
    """
    assert len(prompt) + count <= context, f"{len(prompt)} and {count} tokens are more than {context}"
    key = id(model), context, tuple(prompt)
    if key not in _said or len(_said[key][1]) < count:
        _said[key] = model, _continuation(model, prompt, count, context)
    return _said[key][1][:count]


def _continuation(model: LoadedModel, prompt: Sequence[int], count: int, context: int) -> list[int]:
    cache, length, ids, start = reference.empty_cache(model, context), np.int32(len(prompt)), list(prompt), 0
    whole = len(prompt) // BLOCK * BLOCK
    for end in (*range(BLOCK, whole + 1, BLOCK), *range(whole + 1, len(prompt) + count)):
        tokens = np.array(ids[start:end], np.int32)
        logits, cache = reference.forward(model.graph, model.leaves, cache, tokens, np.int32(start), length)
        if end == len(ids):
            ids.append(int(np.asarray(logits)[-1].argmax()))
        start = end
    return ids[len(prompt) :]
