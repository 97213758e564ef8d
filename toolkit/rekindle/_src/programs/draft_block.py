"""A head that drafts a block of tokens at once: its entries of every token in a step, and the programs that draft.

The entries of a token are keys and values for each of the head's layers, made of the inputs of some of the model's
layers. They lie in the head's layers of the pages at the token's own place, and depend on the text up to there alone.

A call before a step drafts for all rows: the last token of a row and the masks after it are a block, whose tokens see
the row's entries and each other. The block's own keys and values are written to the pages after the text, as those of a
prompt are. The step that checks the drafts overwrites them, or they lie past the text's length.

When entries are written: `draft_entries`.

Axes: N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.models.base import Model, merge
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import SMALLEST_ROWS
from rekindle._src.programs.draft_entries import EarlierTokens, Entry, EntryInputs, KeptEntries
from rekindle._src.programs.draft_model import DRAFTS, DraftChoice, DraftLayout, DraftShaping
from rekindle._src.programs.feature import ChosenStep, Columns
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.target_drafts import HeadProgramRecipes


class BlockEntries(KeptEntries[EntryInputs]):
    """Writes the entries of a head that drafts blocks."""

    def unpack(self, columns: Columns) -> EntryInputs:
        return EntryInputs(columns.row_ints[:, 0])

    def entries(self, step: ChosenStep) -> Sequence[Entry]:
        return step.model.draft_context(step.read, step.inputs.positions, step.inputs.rope_lengths)

    def earlier_entries(self, model: Model, state: RequestState, tokens: EarlierTokens) -> Sequence[Entry]:
        return model.draft_context(tokens.read, tokens.positions, tokens.lengths)


class BlockRecipes(HeadProgramRecipes):
    """The recipes of the programs by which a head drafts blocks."""

    name = "block"

    def _draft(
        self,
        layout: DraftLayout,
        leaves: Sequence[Array],
        kv: paged.KV,
        state: RequestState,
        ints: Array,
        floats: Array,
    ) -> tuple[paged.KV, Array]:
        """Draft tokens [N, DRAFTS] for all rows. Those beyond a row's number are undefined."""
        head, columns, tables = layout.sections(ints)
        steps, used, flags = head
        graph, vocab_size = self.target.graph, self.target.model.vocab_size
        own = graph.config.draft_head
        assert own is not None, "the model has a head"
        assert own.block is not None, "it drafts blocks"
        choice = DraftChoice.of(columns[:, 1:], floats, flags, vocab_size, graph.precision.implementation)
        shaping = DraftShaping.of(layout, columns, floats, state)
        latest, lengths = columns[:, 1], columns[:, 2]
        size, count = own.block.size, min(DRAFTS, own.block.size - 1)
        blocks = jnp.full((layout.rows, size), own.block.mask, jnp.int32)
        blocks = blocks.at[:, 0].set(jnp.clip(latest, 0, vocab_size - 1))
        model: Any = merge(graph, leaves)
        paging, positions = self._paging(tables[0], lengths, used, size)
        attend = paged.PagedAttention(own, kv[-own.num_layers :], paging, SMALLEST_ROWS, self.config.kernels)
        tokens = jnp.concatenate([jnp.zeros(SMALLEST_ROWS, jnp.int32), blocks.reshape(-1)])
        hidden = model.draft_block(tokens, positions, attend)[SMALLEST_ROWS:]
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
