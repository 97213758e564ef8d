"""Heads that draft tokens, of small models: their configs, and their drafts over whole texts without pages.

What a session drafts on the device is recorded and compared with such drafts: those of heads and of assistants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import checkpoints
from rekindle._src.core.records import DraftTask
from rekindle._src.drafts.weights import DraftWeights
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.models.base import LoadedModel, merge
from rekindle._src.models.drafters.own import head_of, leaves_of_head, leaves_of_trunk, trunk_of
from rekindle._src.models.plain import PlainAttention


def with_head(name: str) -> dict[str, Any]:
    return checkpoints.CASES[name] | {"draft_head": True}


def apart(model: LoadedModel) -> tuple[Any, Any]:
    """The module of a model, and that of its head."""
    trunk = merge(trunk_of(model.graph), leaves_of_trunk(model.graph, model.leaves))
    return trunk, merge(head_of(model.graph), leaves_of_head(model.graph, model.leaves))


def drafts(model: LoadedModel, prompt: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The logits of the first draft after each pair of a text [T - 1, V], and of the second after the last pair [V]."""
    module, own = apart(model)
    ids = jnp.array(prompt, jnp.int32)
    hidden = module(ids, jnp.arange(len(ids)), PlainAttention(module, len(ids)), jnp.full(len(ids), len(ids)))

    def head(states: Any, tokens: Any) -> Any:
        length = len(tokens)
        entries = own.entries(tokens, module.embed, states, jnp.arange(length), None)
        attend = PlainAttention(own, length)
        return own.draft(entries.x, attend(0, entries.q, entries.k, entries.v), entries.gate)

    states, tokens = hidden[:-1], ids[1:]
    first = head(states, tokens)
    logits = module.logits(first)
    states = jnp.concatenate([states, first[-1:]])
    second = head(states, jnp.append(tokens, logits[-1].argmax()))
    return np.asarray(logits), np.asarray(module.logits(second[-1:])[0])


def chains(model: LoadedModel, text: list[int], places: list[int], count: int) -> dict[int, list[NDArray[Any]]]:
    """The logits of so many drafts after the tokens at some places of a text, one after the other, without pages.

    Each further draft is after the likeliest token of those before, and reads the head's own state.
    """
    module, own_head = apart(model)
    ids = jnp.array(text, jnp.int32)
    hidden = module(ids, jnp.arange(len(ids)), PlainAttention(module, len(ids)), jnp.full(len(ids), len(ids)))
    known = own_head.entries(ids[1:], module.embed, hidden[:-1], jnp.arange(len(ids) - 1), None)
    (spec,), value_size = own_head.config.attention, own_head.config.pages_of(0).value_size
    joined: Any = jax.jit(lambda tokens, *rest: own_head.entries(tokens, module.embed, *rest))
    rest: Any = jax.jit(lambda *values: (out := own_head.draft(*values), module.logits(out)))

    def drafts(place: int) -> list[NDArray[Any]]:
        keys, values = (None if each is None else np.asarray(each)[: place - 1] for each in (known.k, known.v))
        token, state, found = text[place], hidden[place - 1 : place], list[NDArray[Any]]()
        for position in range(place - 1, place - 1 + count):
            own = joined(jnp.array([token]), state, jnp.array([position]), None)
            keys = np.concatenate([keys, np.asarray(own.k)])
            values = None if values is None else np.concatenate([values, np.asarray(own.v)])
            seen = keys[..., :value_size] if values is None else values
            queries = np.asarray(own.q).reshape(1, keys.shape[1], -1, keys.shape[2])
            scores = np.einsum("tkgd,skd->tkgs", queries, keys) * spec.scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            attended = np.einsum("tkgs,skd->tkgd", weights, seen).reshape(1, -1, seen.shape[2])
            state, logits = rest(own.x, jnp.asarray(attended), own.gate)
            found.append(np.asarray(logits[0]))
            token = int(found[-1].argmax())
        return found

    return {place: drafts(place) for place in places}


Drafted = list[tuple[int, list[int]]]  # the place of the token before drafts, and these


def recorded(monkeypatch: pytest.MonkeyPatch, drafter: type[DraftWeights], whole: Sequence[int]) -> Drafted:
    """The drafts of one request from now on, each with the place of the token before. Of those that are checked, most
    are right: they are replaced by the `whole` text, but for every fifth place."""
    seen: Drafted = []
    original = drafter.work

    def work(self: DraftWeights, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool:
        drafts = original(self, tasks, calls)
        for task in tasks:
            seen.append((task.start, [int(row.token_ids[0]) for row in task.drafts if row.token_ids is not None]))
            for place, row in enumerate(task.drafts, task.start + 1):
                assert row.token_ids is not None
                row.token_ids[0] = whole[place] if place % 5 else 7
        return drafts

    monkeypatch.setattr(drafter, "work", work)
    return seen


def assert_likeliest(seen: Drafted, right: Mapping[int, Sequence[NDArray[Any]]]) -> None:
    """All drafts are the likeliest tokens by the logits at their place."""
    for place, found in seen:
        for logits, token in zip(right[place], found, strict=False):
            assert logits.max() - logits[token] <= 1e-3 * logits.std(), (place, found)
            if token != logits.argmax():
                break  # two that are as likely: what follows is of another text
