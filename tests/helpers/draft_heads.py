"""Heads that draft tokens, of small models: their configs, and their drafts over whole texts without pages."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from helpers import checkpoints
from rekindle._src.models.base import LoadedModel, merge
from rekindle._src.models.plain import PlainAttention


def with_head(name: str) -> dict[str, Any]:
    return checkpoints.CASES[name] | {"draft_head": True}


def drafts(model: LoadedModel, prompt: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The logits of the first draft after each pair of a text [T - 1, V], and of the second after the last pair [V]."""
    module: Any = merge(model.graph, model.leaves)
    ids = jnp.array(prompt, jnp.int32)
    hidden = module(ids, jnp.arange(len(ids)), PlainAttention(module, len(ids)), jnp.full(len(ids), len(ids)))

    def head(states: Any, tokens: Any) -> Any:
        length = len(tokens)
        entries = module.draft_entries(tokens, states, jnp.arange(length), None)
        attend = PlainAttention(module.drafter, length)
        return module.draft(entries.x, attend(0, entries.q, entries.k, entries.v), entries.gate)

    states, tokens = hidden[:-1], ids[1:]
    first = head(states, tokens)
    logits = module.logits(first)
    states = jnp.concatenate([states, first[-1:]])
    second = head(states, jnp.append(tokens, logits[-1].argmax()))
    return np.asarray(logits), np.asarray(module.logits(second[-1:])[0])
