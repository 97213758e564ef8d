"""Heads that draft one token after another: the model's own, and what EAGLE-3's have in common with it.

The entry of a token is made of its hidden state, or of the inputs of some layers, and of the token after it: the one
that the row chose, or the next one of the prompt. It lies in the head's layer of the pages, at the place of the first
of the two, so that pages that are shared, moved or stored have the head's part with them. Another text may follow a
shared page than the one that filled it. Then the entry of the page's last token is not the text's own, and drafts may
be worse; no token depends on that. When entries are written: `entries`.

A call before a step drafts for all rows, up to `DRAFTS` tokens each. For the first draft, the head reads a row's last
token and the model's hidden state before it; for each later one, the token that it drafted last and its own hidden
state. Entries of drafted tokens are written where those of the accepted tokens belong: the step that checks the drafts
overwrites them.

Axes: R decode rows, T prefill tokens, N rows, K kept hidden states of a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.records import HIDDEN_KEPT, EntryLag, IntArray
from rekindle._src.drafts.calls import DRAFTS, DraftChoice, DraftLayout, DraftShaping, prompt_lengths
from rekindle._src.drafts.checkpoint import Target
from rekindle._src.drafts.entries import (
    EarlierTokens,
    Entry,
    EntryCalls,
    EntryDrafter,
    EntryPrograms,
    EntryRows,
    EntryStep,
    HeadWeights,
    KeptEntries,
    head_pages,
    shapes_in,
    with_head_pages,
)
from rekindle._src.drafts.kind import DraftKind, DraftOpening
from rekindle._src.drafts.weights import DraftWeights
from rekindle._src.models.base import merge
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.drafters.own import PREFIX, head_of, leaves_of_head
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.drafting import DraftCalls
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.partitioning import WHOLE, WeightsOf
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import Columns
from rekindle._src.programs.step_part import StepInputs
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.sequence import Limits
from rekindle.errors import ConfigError
from rekindle_kernels import AttentionInputs, AttentionOptions, LayerKV, paged_attention, write_kv


def own_head(target: Target) -> DraftKind:
    """Return the drafter of the model's own head. Raise ConfigError for a model without one."""
    model, placement = target.model, target.placement
    if model.draft_head is None:
        problem = f"needs a head that drafts tokens, and this {model.model_type} model has none that is implemented"
        raise ConfigError("drafts", "mtp", problem, 'Use drafts="suffix" or "auto"')
    if not placement.one_pool:
        problem = "can't draft in several data shards or processes"
        raise ConfigError("drafts", "mtp", problem, "Use devices of one process, with one data shard")
    head = head_of(target.graph)
    own = placement.part(head, PREFIX)
    found = shapes_in(own.local_graph(head), target, leaves_of_head(target.graph, target.leaves))
    layout = WeightsOf(own, found.leaves) if placement.divided else WHOLE
    return OwnHeadKind(HeadPrograms(found._replace(layout=layout), head.config))


@dataclasses.dataclass(frozen=True, eq=False)
class OwnHeadKind(DraftKind):
    """The drafter that is the model's own head."""

    programs: HeadPrograms

    def drafter(self, limits: Limits) -> Drafter:
        return EntryDrafter("mtp", "the model's own head", limits.max_model_len)

    def open(self, opening: DraftOpening) -> DraftWeights:
        def leaves() -> tuple[Array, ...]:
            model = opening.model()
            return leaves_of_head(model.graph, model.leaves)

        return HeadWeights(opening.programs, leaves)


class HeadPrograms(EntryPrograms):
    """Adds a head that drafts one token after another to a session's programs."""

    def features(self) -> tuple[Feature, ...]:
        return (Feature(HeadRows(), HeadEntries(self.shapes)),)

    def calls(self, config: ResolvedConfig, target: Recipes) -> DraftCalls:
        return HeadCalls(config, target, self.shapes)


class DraftHeadInputs(NamedTuple):
    """The integers of each row."""

    missing: Array  # [N]: as in `EntryInputs`
    following: Array  # [N]: the token after it in the prompt; NONE if there is none


class HeadRows(EntryRows[DraftHeadInputs]):
    """Rows of such a head: the token after each in its prompt, too."""

    row_ints = 2

    def write_lag(self, lag: EntryLag, out: IntArray) -> None:
        super().write_lag(lag, out)
        out[1] = lag.following + 1

    def unpack(self, columns: Columns) -> DraftHeadInputs:
        return DraftHeadInputs(columns.row_ints[:, 0], columns.row_ints[:, 1] - 1)


class HeadEntries(KeptEntries[DraftHeadInputs]):
    """Writes the entries of a head that drafts one token after another."""

    def entries(self, head: Any, step: EntryStep[DraftHeadInputs]) -> list[Entry]:
        inputs, model, following = step.inputs, step.model, step.own.following
        after = jnp.where(following >= 0, following, step.tokens)
        after = _tokens_after(inputs, after, model.whole_vocab_size)
        hidden = head.state(step.read)
        entries = head.entries(after, model.embed, hidden, inputs.positions, inputs.rope_lengths)
        return [(entries.k, entries.v)]

    def earlier_entries(self, head: Any, step: EntryStep[DraftHeadInputs], tokens: EarlierTokens) -> list[Entry]:
        model, state = step.model, step.state
        assert state.after is not None, "a session whose model has a head keeps the tokens after those"
        after = jnp.clip(state.after[tokens.slot, tokens.kept], 0, model.whole_vocab_size - 1)
        entries = head.entries(after, model.embed, head.state(tokens.read), tokens.positions, tokens.lengths)
        return [(entries.k, entries.v)]


def _tokens_after(inputs: StepInputs, last: Array, vocab_size: int) -> Array:
    """Return the token after each of a step's tokens [R + T], where `last` [N] are those after rows."""
    count = inputs.tokens.shape[0]
    places = jnp.where(inputs.lengths > 0, inputs.last, count)
    after = jnp.roll(inputs.tokens, -1).at[places].set(last, mode="drop")
    return jnp.clip(after, 0, vocab_size - 1)  # places of pictures have no token of the vocabulary


class HeadCalls(EntryCalls):
    """The programs that draft one token after another."""

    name = "head"

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
        table = tables[0]
        slots, latest, lengths, counts = (columns[:, column] for column in range(4))
        graph, vocab_size, rows = self.target.graph, self.target.model.vocab_size, lax.iota(jnp.int32, layout.rows)
        head: Any = merge(self.shapes.graph, leaves)
        model = merge(graph, target_leaves)
        choice = DraftChoice.of(columns[:, 1:], floats, flags, vocab_size, graph.precision.implementation)
        shaping = DraftShaping.of(layout, columns, floats, state)
        options = attention_options(head.config, layout.rows, deterministic=graph.precision.deterministic)
        none = jnp.zeros(1, jnp.int32)
        before = jnp.maximum(lengths - 2, 0)  # the place of the first entry: of the token before the last one
        prompts = prompt_lengths(columns)
        assert state.hidden is not None, "a session whose model has a head keeps hidden states"

        def another(place: Array, carry: tuple[LayerKV, Array, Array, Array]) -> tuple[LayerKV, Array, Array, Array]:
            pages, tokens, hidden, drafts = carry
            drafting, positions = place < counts, before + place
            inputs = jnp.clip(tokens, 0, vocab_size - 1)
            entries = head.entries(inputs, model.embed, hidden, positions, jnp.maximum(prompts, positions + 1))
            page_ids = jnp.where(drafting, table[rows, jnp.minimum(positions // pages.page_size, layout.width - 1)], 0)
            offsets = jnp.where(drafting, positions % pages.page_size, 0)
            pages = write_kv(pages, entries.k, entries.v, page_ids, offsets)
            ends = jnp.where(drafting, positions + 1, 0)
            queries = AttentionInputs(entries.q, pages, table, ends, none, none[0], None, None)
            attended = paged_attention(queries, options, implementation=self.config.kernels)
            hidden = head.draft(entries.x, attended, entries.gate)
            scores = head.scores(hidden, model.logits, used)
            tokens = choice.tokens(scores.logits, lengths + place, shaping.at(place, drafts), scores.ids)
            return pages, tokens, hidden.astype(carry[2].dtype), drafts.at[:, place].set(tokens)

        first = head.state(state.hidden[slots, before % HIDDEN_KEPT])
        drafts, (own,) = jnp.zeros((layout.rows, DRAFTS), jnp.int32), head_pages(kv, 1)
        pages, _, _, drafts = lax.fori_loop(0, steps, another, (own, latest, first, drafts))
        return with_head_pages(kv, (pages,)), drafts


def attention_options(config: ModelConfig, rows: int, *, deterministic: bool) -> AttentionOptions:
    """Return how the layer of a head attends to its pages, in a call of so many rows."""
    (spec,), kept = config.attention, config.pages_of(0)
    return AttentionOptions(
        rows,
        spec.scale,
        spec.sliding_window,
        spec.soft_cap,
        deterministic=deterministic,
        value_size=kept.value_size if kept.latent else None,
    )
