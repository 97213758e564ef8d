"""The programs of an assistant, which drafts tokens over the pages of the session's model.

A call drafts for all rows, up to `DRAFTS` tokens each, all at the position of the row's last token, whose keys the
model has not computed yet: the assistant attends to those before it. It reads the model's hidden state before that
token, and after it its own. Where a layer has a window, it sees the keys that the model's own row at that position
will see, whose pages the row brings.

Axes: N rows, W pages of the longest sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.records import HIDDEN_KEPT, DraftTask, PageRun
from rekindle._src.models.base import merge
from rekindle._src.models.config import ModelConfig, Pages
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.draft_model import (
    DRAFTS,
    DraftChoice,
    DraftLayout,
    DraftShapes,
    DraftShaping,
)
from rekindle._src.programs.partitioning import PAGES, ROWS, WEIGHTS, Recipe
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.target_drafts import TargetDrafts
from rekindle_kernels import AttentionInputs, AttentionOptions, paged_attention


def source_layers(assistant: ModelConfig, model: ModelConfig) -> tuple[int | None, ...]:
    """Return for each layer of an assistant the layer whose pages it attends to: the last one of the same kind, with a
    window or without, that has pages. None where the model has none."""
    kinds = [spec.sliding_window is not None for spec in model.attention]
    own = [layer for layer in range(model.num_layers) if isinstance(model.caches[layer].pages, Pages)]
    last = {slides: max((layer for layer in own if kinds[layer] == slides), default=None) for slides in (True, False)}
    return tuple(last[spec.sliding_window is not None] for spec in assistant.attention)


@dataclasses.dataclass(frozen=True)
class AssistantRecipes(TargetDrafts):
    """The recipes of an assistant's programs, over those of the model that it drafts for."""

    name = "assistant"
    shapes: DraftShapes

    @functools.cached_property
    def windows(self) -> int | None:
        """The number of the side cache with pages of layers that give some back; None without one."""
        names = [plan.name for plan in self.target.sides]
        return names.index("windows") if "windows" in names else None

    def layout(self, rows: int) -> DraftLayout:
        return DraftLayout(rows, self.target.width, tables=1 if self.windows is None else 2, shaped=True)

    def pack(self, rows: int, tasks: Sequence[DraftTask]) -> tuple[np.ndarray, np.ndarray]:
        ints, floats = super().pack(rows, tasks)
        if self.windows is not None:
            _, _, tables = self.layout(rows).sections(ints)
            for place, task in enumerate(tasks):
                run = task.row.sides[self.windows]
                assert isinstance(run, PageRun), "the row has no pages of layers that give some back"
                tables[1, place, run.first : run.first + len(run.pages)] = run.pages
        return ints, floats

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """The layer whose pages each layer attends to."""
        found = source_layers(self.shapes.graph.config, self.target.model)
        assert None not in found, "it was checked"
        return tuple(layer for layer in found if layer is not None)

    def _recipe(self, layout: DraftLayout, arguments: tuple[Any, ...]) -> Recipe:
        operands = (WEIGHTS, WEIGHTS, PAGES, ROWS, ROWS, ROWS)
        return Recipe(functools.partial(self._draft, layout), (self.shapes.leaves, *arguments), (), operands, ROWS)

    def _draft(
        self,
        layout: DraftLayout,
        leaves: Sequence[Array],
        target_leaves: Sequence[Array],
        kv: paged.KV,
        state: RequestState,
        ints: Array,
        floats: Array,
    ) -> Array:
        """Draft tokens [N, DRAFTS] for all rows. Those beyond a row's number are undefined."""
        head, columns, tables = layout.sections(ints)
        steps, used, flags = head
        slots, latest, lengths = columns[:, 0], columns[:, 1], columns[:, 2]
        graph, vocab_size = self.shapes.graph, self.target.model.vocab_size
        choice = DraftChoice.of(columns[:, 1:], floats, flags, vocab_size, graph.precision.implementation)
        assistant: Any = merge(graph, leaves)
        model: Any = merge(self.target.graph, target_leaves)
        before = jnp.maximum(lengths - 1, 0)  # keys that the model has, and the position of the last token
        attend = self._attention(layout, kv, tables, before)
        shaping = DraftShaping.of(layout, columns, floats, state)
        assert state.hidden is not None, "a session with an assistant keeps hidden states"
        hidden = state.hidden[slots, jnp.maximum(before - 1, 0) % HIDDEN_KEPT]

        def another(place: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            tokens, hidden, drafts = carry
            embedded = model.embedded(jnp.clip(tokens, 0, vocab_size - 1))
            own, following = assistant(embedded, hidden, before, attend)
            tokens = choice.tokens(assistant.logits(own, used), lengths + place, shaping.at(place, drafts))
            return tokens, following.astype(hidden.dtype), drafts.at[:, place].set(tokens)

        drafts = jnp.zeros((layout.rows, DRAFTS), jnp.int32)
        _, _, drafts = lax.fori_loop(0, steps, another, (latest, hidden, drafts))
        return drafts

    def _attention(self, layout: DraftLayout, kv: paged.KV, tables: Array, lengths: Array) -> Callable[..., Array]:
        """Return an `Attend` to the model's pages: one query for each row, to the first `lengths` [N] keys."""
        none = jnp.zeros(1, jnp.int32)

        def attend(layer: int, q: Array, k: None, v: None) -> Array:
            entry, spec = kv[self.sources[layer]], self.shapes.graph.config.attention[layer]
            apart = entry.windows is not None
            pages = entry.windows if apart else entry.pages
            assert pages is not None, "the layer has pages"
            # The token at the position is none of the keys, and counts for the window.
            window = None if spec.sliding_window is None else max(1, spec.sliding_window - 1)
            options = AttentionOptions(layout.rows, spec.scale, window, spec.soft_cap)
            inputs = AttentionInputs(q, pages, tables[int(apart)], lengths, none, none[0], None, None)
            return paged_attention(inputs, options, implementation=self.config.kernels)

        return attend
