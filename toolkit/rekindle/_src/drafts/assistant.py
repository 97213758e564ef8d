"""An assistant that drafts tokens over the pages of the session's model: its rule, its programs and weights.

A call drafts for all rows, up to `DRAFTS` tokens each, all at the position of the row's last token, whose keys the
model has not computed yet: the assistant attends to those before it. It reads the model's hidden state before that
token, and after it its own. Where a layer has a window, it sees the keys that the model's own row at that position
will see, whose pages the row brings. It misses nothing of a text, and keeps nothing of it.

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

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.records import HIDDEN_KEPT, DraftTask, PageRun
from rekindle._src.drafts.calls import DRAFTS, DraftChoice, DraftLayout, DraftShaping, TargetCalls
from rekindle._src.drafts.checkpoint import DraftCheckpoint, DraftShapes, Target, refuse
from rekindle._src.drafts.hidden import HiddenDrafter
from rekindle._src.drafts.kind import DraftKind, DraftOpening
from rekindle._src.drafts.weights import DraftWeights, take
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.models.base import merge
from rekindle._src.models.config import AssistantSpec, ModelConfig, Pages
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.drafting import DraftCalls, DraftPrograms
from rekindle._src.programs.partitioning import PAGES, ROWS, WEIGHTS, Recipe
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.request_state import RequestState
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.sequence import Limits
from rekindle_kernels import AttentionInputs, AttentionOptions, paged_attention


def kind_of(checkpoint: DraftCheckpoint, target: Target) -> DraftKind:
    """Return the drafter of an assistant. Raise ConfigError for one of another model."""
    if target.placement.divided:
        problem = "is an assistant, which attends to this model's pages: several devices have a part of them each"
        refuse(checkpoint.name, problem, "Use one device, or a small model with the same tokenizer")
    spec = checkpoint.config.assists
    assert spec is not None, "the checkpoint is an assistant"
    _check(checkpoint.name, checkpoint.config, spec, target.model)
    return AssistantKind(checkpoint, AssistantPrograms(checkpoint.shapes))


def _check(name: str, own: ModelConfig, spec: AssistantSpec, model: ModelConfig) -> None:
    fix = "Use the assistant that was made for this model"
    if spec.hidden_size != model.hidden_size:
        problem = f"drafts for a model whose hidden states have {spec.hidden_size:,} numbers, and this one's have"
        refuse(name, f"{problem} {model.hidden_size:,}", fix)
    if own.vocab_size != model.vocab_size:
        problem = f"has a vocabulary of {own.vocab_size:,} tokens, and this model one of {model.vocab_size:,}"
        refuse(name, problem, fix)
    for layer, source in enumerate(source_layers(own, model)):
        kind = "full attention" if own.attention[layer].sliding_window is None else "a window"
        if source is None:
            refuse(name, f"attends to a layer with {kind}, and this {model.model_type} model has none", fix)
        wanted, there = own.pages_of(layer), model.pages_of(source)
        if wanted != there:
            problem = f"attends to a layer with {kind} and {_heads(wanted)}, and this model's has {_heads(there)}"
            refuse(name, problem, fix)


def _heads(pages: Pages) -> str:
    return f"{pages.heads} heads of {pages.key_size}"


@dataclasses.dataclass(frozen=True, eq=False)
class AssistantKind(DraftKind):
    """The drafter that is an assistant."""

    checkpoint: DraftCheckpoint
    programs: AssistantPrograms

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        return self.checkpoint.device_bytes

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.checkpoint.fingerprint

    def drafter(self, limits: Limits) -> Drafter:
        return HiddenDrafter("assistant", "the assistant", self.checkpoint.config.max_position_embeddings)

    def check(self, tokenizer: Any) -> None:
        self.checkpoint.check_tokens(tokenizer, required=False)

    def open(self, opening: DraftOpening) -> DraftWeights:
        opening.show("weights of the model that drafts")
        return AssistantWeights(opening.programs, lambda: self.checkpoint.load().leaves)


class AssistantWeights(DraftWeights):
    """Owns an assistant's weights. An assistant has no pages, so it never has to catch up with a text."""

    def work(self, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool:
        program, ints, floats = self._drafting(tasks)
        take(tasks, calls.ahead(program, self._leaves, ints, floats))
        return True


class AssistantPrograms(DraftPrograms):
    """Adds calls of an assistant, which read the final hidden state, to a session's programs."""

    reads = ()

    def __init__(self, shapes: DraftShapes) -> None:
        self.shapes = shapes

    def calls(self, config: ResolvedConfig, target: Recipes) -> DraftCalls:
        return AssistantCalls(config, target, self.shapes)

    def facts(self) -> dict[str, object]:
        return {"drafter": self.shapes.facts()}


def source_layers(assistant: ModelConfig, model: ModelConfig) -> tuple[int | None, ...]:
    """Return the model's layer that each layer of an assistant attends to: the last one of its kind, with a window or
    without, that has pages. None where the model has no such layer."""
    kinds = [spec.sliding_window is not None for spec in model.attention]
    own = [layer for layer in range(model.num_layers) if isinstance(model.caches[layer].pages, Pages)]
    last = {slides: max((layer for layer in own if kinds[layer] == slides), default=None) for slides in (True, False)}
    return tuple(last[spec.sliding_window is not None] for spec in assistant.attention)


@dataclasses.dataclass(frozen=True)
class AssistantCalls(TargetCalls):
    """The programs of an assistant, over the pages and the state of the session's model."""

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
        """The model's layer that each layer attends to."""
        layers = source_layers(self.shapes.graph.config, self.target.model)
        assert None not in layers, "it was checked"
        return tuple(layer for layer in layers if layer is not None)

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
