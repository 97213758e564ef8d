"""The head that drafts tokens: what it keeps of every token in a step, and the programs that draft.

The head is the model's own, or EAGLE-3's of another checkpoint, which is then part of the model. The entry of a token
is made of its hidden state, or of the inputs of some layers, and of the token after it: the one that the row chose, or
the next one of the prompt. It lies in the head's layer of the pages, at the place of the first of the two, so that
pages that are shared, moved or stored have the head's part with them. Another text may follow a shared page than the
one that filled it. Then the entry of the page's last token is not the text's own, and drafts may be worse; no token
depends on that.

Entries cost a small part of a layer. While no row drafts, a step of decode rows runs the same program as without a
head, which stores each row's hidden state and token but no entries. The next step that computes entries, at the latest
after `MOST_BEHIND` tokens, adds the missing ones, all of a row at once, so that the head's matrices are read only once.

A call before a step drafts for all rows, up to `DRAFTS` tokens each. For the first draft, the head reads a row's last
token and the model's hidden state before it; for each later one, the token that it drafted last and its own hidden
state. Entries of drafted tokens are written where those of the accepted tokens belong: the step that checks the drafts
overwrites them.

Axes: R decode rows, T prefill tokens, N rows, K kept hidden states of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.records import HIDDEN_KEPT, IntArray, Row, StepPlan
from rekindle._src.models.base import Model, merge
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.draft_model import (
    DRAFTS,
    DraftChoice,
    DraftLayout,
    DraftShaping,
    prompt_lengths,
)
from rekindle._src.programs.feature import ChosenStep, Columns, Feature, StepInputs
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.target_drafts import HeadProgramRecipes
from rekindle_kernels import AttentionInputs, AttentionOptions, LayerKV, paged_attention, write_kv


class DraftHeadInputs(NamedTuple):
    """The integers of each row."""

    following: Array  # [N]: the token after it in the prompt; NONE if there is none
    behind: Array  # [N]: tokens before it for which the head has no entries


class DraftChains(Feature):
    """Drafts that follow each other where layers have states: a step without drafts need not look for them."""

    variant, warmed = ProgramVariant.DRAFTS, True
    inside = True  # programs made of parts share what layers get

    def in_plan(self, plan: StepPlan) -> bool:
        return any(row.draft for row in plan.decode)


class HeadEntries(Feature[DraftHeadInputs, tuple[()]]):
    """Writes the head's entries for a step's tokens, and for earlier tokens of its rows that lack them."""

    row_ints, follows = 2, True
    variant, warmed = ProgramVariant.DRAFTS, True
    inside = True  # it needs pages after the choice, which programs made of parts have given away

    def in_plan(self, plan: StepPlan) -> bool:
        return plan.enters

    def write_row(self, row: Row, out: IntArray) -> None:
        out[:] = row.following + 1, min(row.behind, HIDDEN_KEPT)

    def unpack(self, columns: Columns) -> DraftHeadInputs:
        return DraftHeadInputs(columns.row_ints[:, 0] - 1, columns.row_ints[:, 1])

    def follow(self, step: ChosenStep, kv: paged.KV) -> paged.KV:
        inputs, model, own = step.inputs, step.model, step.own
        after = jnp.where(own.following >= 0, own.following, step.tokens)
        after = _tokens_after(inputs, after, model.whole_vocab_size)
        state = model.draft_state(step.read)
        entries = model.draft_entries(after, state, inputs.positions, inputs.rope_lengths)
        pages = _caught_up(model, inputs, step.state, own.behind, _pages(kv))
        return _with_pages(kv, write_kv(pages, entries.k, entries.v, inputs.page_ids, inputs.offsets))


def _pages(kv: paged.KV) -> LayerKV:
    """Return the pages of the head's layer, which is the last one."""
    pages = kv[-1].pages
    assert pages is not None, "the head has pages"
    return pages


def _with_pages(kv: paged.KV, pages: LayerKV) -> paged.KV:
    return (*kv[:-1], kv[-1]._replace(pages=pages))


def _caught_up(model: Model, inputs: StepInputs, state: RequestState, behind: Array, pages: LayerKV) -> LayerKV:
    """Return the head's pages with the missing entries: of the `behind` [N] tokens before each decode row."""
    hidden, after, size = state.hidden, state.after, pages.page_size
    assert hidden is not None, "a session whose model has a head keeps hidden states"
    assert after is not None, "and the tokens after them"
    rows = behind.shape[0]
    (waiting,) = jnp.nonzero(behind > 0, size=rows, fill_value=0)

    def catch_up(number: Array, pages: LayerKV) -> LayerKV:
        row = waiting[number]
        slot, place = inputs.slots[row], lax.iota(jnp.int32, HIDDEN_KEPT)
        missing = place < behind[row]
        positions = jnp.where(missing, inputs.lengths[row] - 1 - behind[row] + place, 0)
        kept = positions % HIDDEN_KEPT
        lengths = jnp.maximum(inputs.prompt_lengths[inputs.last[row]], positions + 1)
        follows = jnp.clip(after[slot, kept], 0, model.whole_vocab_size - 1)
        entries = model.draft_entries(follows, model.draft_state(hidden[slot, kept]), positions, lengths)
        page_ids = jnp.where(missing, inputs.page_table[row, positions // size], 0)
        return write_kv(pages, entries.k, entries.v, page_ids, jnp.where(missing, positions % size, 0))

    caught: LayerKV = lax.fori_loop(0, (behind > 0).astype(jnp.int32).sum(), catch_up, pages)
    return caught


def _tokens_after(inputs: StepInputs, last: Array, vocab_size: int) -> Array:
    """Return the token after each of a step's tokens [R + T], where `last` [N] are those after rows."""
    count = inputs.tokens.shape[0]
    places = jnp.where(inputs.lengths > 0, inputs.last, count)
    after = jnp.roll(inputs.tokens, -1).at[places].set(last, mode="drop")
    return jnp.clip(after, 0, vocab_size - 1)  # places of pictures have no token of the vocabulary


class HeadRecipes(HeadProgramRecipes):
    """The recipes of the programs by which a head drafts one token after another."""

    name = "head"

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
        table = tables[0]
        slots, latest, lengths, counts = (columns[:, column] for column in range(4))
        graph, vocab_size, rows = self.target.graph, self.target.model.vocab_size, lax.iota(jnp.int32, layout.rows)
        model: Any = merge(graph, leaves)
        choice = DraftChoice.of(columns[:, 1:], floats, flags, vocab_size, graph.precision.implementation)
        shaping = DraftShaping.of(layout, columns, floats, state)
        options = attention_options(model.config, layout.rows, deterministic=graph.precision.deterministic)
        none = jnp.zeros(1, jnp.int32)
        before = jnp.maximum(lengths - 2, 0)  # the place of the first entry: of the token before the last one
        prompts = prompt_lengths(columns)
        assert state.hidden is not None, "a session whose model has a head keeps hidden states"

        def another(place: Array, carry: tuple[LayerKV, Array, Array, Array]) -> tuple[LayerKV, Array, Array, Array]:
            pages, tokens, hidden, drafts = carry
            drafting, positions = place < counts, before + place
            entries = model.draft_entries(
                jnp.clip(tokens, 0, vocab_size - 1), hidden, positions, jnp.maximum(prompts, positions + 1)
            )
            page_ids = jnp.where(drafting, table[rows, jnp.minimum(positions // pages.page_size, layout.width - 1)], 0)
            offsets = jnp.where(drafting, positions % pages.page_size, 0)
            pages = write_kv(pages, entries.k, entries.v, page_ids, offsets)
            ends = jnp.where(drafting, positions + 1, 0)
            inputs = AttentionInputs(entries.q, pages, table, ends, none, none[0], None, None)
            attended = paged_attention(inputs, options, implementation=self.config.kernels)
            hidden = model.draft(entries.x, attended, entries.gate)
            scores = model.draft_scores(hidden, used)
            tokens = choice.tokens(scores.logits, lengths + place, shaping.at(place, drafts), scores.ids)
            return pages, tokens, hidden.astype(carry[2].dtype), drafts.at[:, place].set(tokens)

        first = model.draft_state(state.hidden[slots, before % HIDDEN_KEPT])
        drafts = jnp.zeros((layout.rows, DRAFTS), jnp.int32)
        pages, _, _, drafts = lax.fori_loop(0, steps, another, (_pages(kv), latest, first, drafts))
        return _with_pages(kv, pages), drafts


def attention_options(config: ModelConfig, rows: int, *, deterministic: bool) -> AttentionOptions:
    """Return how the head's layer attends to its pages, in a call of so many rows."""
    assert config.draft_head is not None, "the model has a head"
    (spec,), kept = config.draft_head.attention, config.draft_head.pages_of(0)
    return AttentionOptions(
        rows,
        spec.scale,
        spec.sliding_window,
        spec.soft_cap,
        deterministic=deterministic,
        value_size=kept.value_size if kept.latent else None,
    )
