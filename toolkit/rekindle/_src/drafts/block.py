"""Heads that draft a block of tokens at once (DFlash): the rule, the entries of every token in a step, the programs.

The entries of a token are keys and values for each of the head's layers, made of the inputs of some of the model's
layers. They lie in the head's layers of the pages at the token's own place, and depend on the text up to there alone.

A call before a step drafts for all rows: the last token of a row and the masks after it are a block, whose tokens see
the row's entries and each other. The block's own keys and values are written to the pages after the text, as those of a
prompt are. The step that checks the drafts overwrites them, or they lie past the text's length.

When entries are written: `entries`.

Axes: N rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.drafts.calls import DRAFTS, DraftChoice, DraftLayout, DraftShaping
from rekindle._src.drafts.checkpoint import DraftCheckpoint, DraftShapes, Target, refuse
from rekindle._src.drafts.entries import (
    FIX,
    EarlierTokens,
    Entry,
    EntryCalls,
    EntryDrafter,
    EntryInputs,
    EntryPrograms,
    EntryRows,
    EntryStep,
    KeptEntries,
    OtherHeadKind,
    fitted,
    shapes_in,
)
from rekindle._src.drafts.kind import DraftKind
from rekindle._src.models.base import merge
from rekindle._src.models.config import BlockSpec, ModelConfig
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import SMALLEST_ROWS
from rekindle._src.programs.drafting import DraftCalls
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import Columns
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.sequence import Limits


def kind_of(checkpoint: DraftCheckpoint, target: Target) -> DraftKind:
    """Return the drafter of such a head. Raise ConfigError if it was made for another model."""
    spec, model = checkpoint.config.block, target.model
    assert spec is not None, "the checkpoint is a head of DFlash"
    checkpoint = fitted(checkpoint, target, checkpoint.config.reads, checkpoint.config.hidden_size)
    if spec.mask >= model.vocab_size:
        problem = f"has mask_token_id={spec.mask:,}, and the vocabulary of this model has"
        refuse(checkpoint.name, f"{problem} {model.vocab_size:,} tokens", FIX)
    shapes = shapes_in(checkpoint.plan.graph, target, checkpoint.shapes.leaves)
    return BlockKind("dflash", "the DFlash head", checkpoint, BlockPrograms(shapes, checkpoint.config, spec))


@dataclasses.dataclass(frozen=True, eq=False)
class BlockKind(OtherHeadKind):
    """The drafter that is a head of DFlash."""

    programs: BlockPrograms

    def drafter(self, limits: Limits) -> Drafter:
        return EntryDrafter(self.name, self.words, limits.max_model_len, self.programs.spec.size)


class BlockPrograms(EntryPrograms):
    """Adds such a head to a session's programs."""

    def __init__(self, shapes: DraftShapes, config: ModelConfig, spec: BlockSpec) -> None:
        super().__init__(shapes, config)
        self.spec = spec

    def features(self) -> tuple[Feature, ...]:
        return (Feature(BlockRows(), BlockEntries(self.shapes)),)

    def calls(self, config: ResolvedConfig, target: Recipes) -> DraftCalls:
        return BlockCalls(config, target, self.shapes, self.spec)


class BlockRows(EntryRows[EntryInputs]):
    """Rows of a head that drafts blocks."""

    def unpack(self, columns: Columns) -> EntryInputs:
        return EntryInputs(columns.row_ints[:, 0])


class BlockEntries(KeptEntries[EntryInputs]):
    """Writes the entries of a head that drafts blocks."""

    def entries(self, head: Any, step: EntryStep[EntryInputs]) -> Sequence[Entry]:
        context: Sequence[Entry] = head.context(step.read, step.inputs.positions, step.inputs.rope_lengths)
        return context

    def earlier_entries(self, head: Any, step: EntryStep[EntryInputs], tokens: EarlierTokens) -> Sequence[Entry]:
        context: Sequence[Entry] = head.context(tokens.read, tokens.positions, tokens.lengths)
        return context


@dataclasses.dataclass(frozen=True)
class BlockCalls(EntryCalls):
    """The programs that draft blocks."""

    name = "block"
    spec: BlockSpec

    def _draft(
        self,
        layout: DraftLayout,
        leaves: Sequence[Array],
        target_leaves: Sequence[Array],
        kv: paged.KV,
        state: RequestState,
        ints: Array,
        floats: Array,
    ) -> tuple[paged.KV, Array]:
        """Draft tokens [N, DRAFTS] for all rows. Those beyond a row's number are undefined."""
        counted, columns, tables = layout.sections(ints)
        steps, used, flags = counted
        graph, vocab_size = self.target.graph, self.target.model.vocab_size
        choice = DraftChoice.of(columns[:, 1:], floats, flags, vocab_size, graph.precision.implementation)
        shaping = DraftShaping.of(layout, columns, floats, state)
        latest, lengths = columns[:, 1], columns[:, 2]
        size, count = self.spec.size, min(DRAFTS, self.spec.size - 1)
        blocks = jnp.full((layout.rows, size), self.spec.mask, jnp.int32)
        blocks = blocks.at[:, 0].set(jnp.clip(latest, 0, vocab_size - 1))
        head: Any = merge(self.shapes.graph, leaves)
        model: Any = merge(graph, target_leaves)
        own = head.config
        paging, positions = self._paging(tables[0], lengths, used, size)
        attend = paged.PagedAttention(own, kv[-own.num_layers :], paging, SMALLEST_ROWS, self.config.kernels)
        tokens = jnp.concatenate([jnp.zeros(SMALLEST_ROWS, jnp.int32), blocks.reshape(-1)])
        hidden = head(model.embedded(tokens), positions, attend)[SMALLEST_ROWS:]
        hidden = hidden.reshape(layout.rows, size, -1)[:, 1 : 1 + count]
        logits = model.logits(hidden.reshape(layout.rows * count, -1), used * count)
        logits = logits.reshape(layout.rows, count, -1)

        def another(place: Array, drafts: Array) -> Array:
            tokens = choice.tokens(logits[:, place], lengths + place, shaping.at(place, drafts))
            return drafts.at[:, place].set(tokens)

        drafts = jnp.zeros((layout.rows, DRAFTS), jnp.int32)
        drafts = lax.fori_loop(0, jnp.minimum(steps, count), another, drafts)
        return (*kv[: -own.num_layers], *attend.kv), drafts

    def _paging(self, table: Array, lengths: Array, used: Array, size: int) -> tuple[paged.Paging, Array]:
        """Return where the blocks of the `used` rows lie and attend, and the positions of their tokens.

        As in steps, rows of one token come first: these are empty.
        """
        page_size, (rows, width) = self.target.page_size, table.shape
        numbers, none = lax.iota(jnp.int32, rows), jnp.zeros(SMALLEST_ROWS, jnp.int32)
        valid, start = numbers < used, jnp.maximum(lengths - 1, 0)
        places = jnp.where(valid[:, None], start[:, None] + lax.iota(jnp.int32, size), 0)
        pages = jnp.take_along_axis(table, jnp.minimum(places // page_size, width - 1), axis=1)
        pages = jnp.where(valid[:, None], pages, 0)
        paging = paged.Paging(
            jnp.concatenate([none, pages.reshape(-1)]),
            jnp.concatenate([none, (places % page_size).reshape(-1)]),
            jnp.concatenate([jnp.zeros((SMALLEST_ROWS, width), jnp.int32), table]),
            jnp.concatenate([none, jnp.where(valid, start + size, 0)]),
            jnp.minimum(lax.iota(jnp.int32, rows + 1), used) * size,
            used,
            {},
        )
        return paging, jnp.concatenate([none, places.reshape(-1)])
