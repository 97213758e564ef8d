"""The model's own head that drafts tokens, in a step: what it keeps of every token, and a draft after each row.

The entry of a token is made of its hidden state and of the token after it: the one that the row chose, or the next one
of the prompt. It lies in the head's layer of the pages, at the place of the first of the two, so that pages that are
shared, moved or stored have the head's part with them. Another text may follow a shared page than the one that filled
it. Then the entry of the page's last token is not the text's own, and drafts may be worse; no token depends on that.

Entries cost a small part of a layer. Everything else, attention, MLP and the vocabulary, is computed for the rows'
last tokens alone, in steps that have a row which drafts.

Where no row drafts, a step of decode rows is the same program as without a head, which only keeps each row's hidden
state and token. The head falls behind the text then. The next step with the head, at the latest when as many are kept
as there is room for, makes the entries that are missing, all of a row at once: its matrices are read once for them.

Axes: R decode rows, T prefill tokens, N rows, K kept hidden states of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.records import HIDDEN_KEPT, IntArray, Request, Row, StepPlan
from rekindle._src.core.report_kinds import DRAFTED
from rekindle._src.models.base import Model
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.feature import Columns, Feature, FeatureRead, RowFlag, RowReports, StepInputs, branch
from rekindle._src.programs.request_state import RequestState
from rekindle_kernels import AttentionInputs, AttentionOptions, LayerKV, paged_attention, write_kv

NONE = -1  # no token


def _drafts(row: Row) -> int:
    return int(RowFlag.DRAFTING) if row.drafting else 0


class DraftHeadInputs(NamedTuple):
    """The integers of each row."""

    following: Array  # [N]: the token after it in the prompt; NONE if there is none
    behind: Array  # [N]: tokens before it of which the head has no entries


class DraftChains(Feature):
    """Drafts that follow each other where layers have states: a step without drafts need not look for them."""

    variant, warmed = ProgramVariant.DRAFTS, True
    inside = True  # programs made of parts share what layers get

    def in_plan(self, plan: StepPlan) -> bool:
        return any(row.draft for row in plan.decode)


class DraftedTokens(Feature):
    """The draft after each row: integers of the row, and a column of the result."""

    bits, row_ints, width, follows = int(RowFlag.DRAFTING), 2, 1, True
    variant, warmed = ProgramVariant.DRAFTS, True
    inside = True  # it needs pages after the choice, which programs made of parts have given away

    def in_plan(self, plan: StepPlan) -> bool:
        return plan.enters

    def row_flags(self, request: Request) -> Callable[[Row], int]:
        return _drafts

    def write_row(self, row: Row, out: IntArray) -> None:
        out[:] = row.following + 1, min(row.behind, HIDDEN_KEPT)

    def unpack(self, columns: Columns) -> DraftHeadInputs:
        return DraftHeadInputs(columns.row_ints[:, 0] - 1, columns.row_ints[:, 1])

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        if not read.columns.shape[1]:
            return  # the step ran as two programs, without the head
        for row, token, place, report in zip(read.plan.rows, read.tokens, read.places, reports, strict=True):
            if row.drafting and token is not None:
                DRAFTED.put(report, int(read.columns[place, 0]))


def drafted(
    model: Model,
    hidden: Array,
    inputs: StepInputs,
    state: RequestState,
    own: DraftHeadInputs,
    tokens: Array,
    kv: paged.KV,
    sample: Callable[[Array], Array],
    *,
    implementation: str | None,
    deterministic: bool,
) -> tuple[paged.KV, Array]:
    """Return the pages with the head's entries, and the draft [N] after each row; NONE in steps without drafts.

    `hidden` [R + T, E] are the model's hidden states, `tokens` [N] those that rows chose, and `state` is that after the
    choice. `sample` chooses tokens by the logits of drafts.
    """
    head: ModelConfig | None = model.config.draft_head
    assert head is not None, "the model has a head"
    after = _tokens_after(inputs, jnp.where(own.following >= 0, own.following, tokens), model.config.vocab_size)
    entries = model.draft_entries(after, hidden, inputs.positions, inputs.rope_lengths)
    layer = kv[-1]
    assert layer.pages is not None, "the head has pages"
    pages = _caught_up(model, inputs, state, own.behind, layer.pages)
    pages = write_kv(pages, entries.k, entries.v, inputs.page_ids, inputs.offsets)
    (spec,) = head.attention
    kept = head.pages_of(0)
    options = AttentionOptions(
        inputs.flags.shape[0],
        spec.scale,
        spec.sliding_window,
        spec.soft_cap,
        deterministic=deterministic,
        value_size=kept.value_size if kept.latent else None,
    )

    # Attention reads nothing of rows without a length. It is not under the condition, which would copy the pages.
    drafting, (x, queries, gate) = inputs.flag(RowFlag.DRAFTING), entries.of(inputs.last)
    lengths, no_prompts = jnp.where(drafting, inputs.lengths, 0), jnp.zeros(1, jnp.int32)
    call = AttentionInputs(queries, pages, inputs.page_table, lengths, no_prompts, no_prompts[0], None, None)
    attended = paged_attention(call, options, implementation=implementation)

    def drafts() -> Array:
        numbers = jnp.arange(1, inputs.flags.shape[0] + 1, dtype=jnp.int32)
        needed = jnp.max(numbers, initial=0, where=drafting)
        return sample(model.logits(model.draft(x, attended, gate), needed))

    none = jnp.full(inputs.flags.shape, NONE, jnp.int32)
    wanted = inputs.any_flags & int(RowFlag.DRAFTING) != 0
    return (*kv[:-1], layer._replace(pages=pages)), branch(wanted, drafts, lambda: none)


def _caught_up(model: Model, inputs: StepInputs, state: RequestState, behind: Array, pages: LayerKV) -> LayerKV:
    """Return the head's pages with the entries of the tokens that it is `behind` [N]: those before decode rows."""
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
        entries = model.draft_entries(
            jnp.clip(after[slot, kept], 0, model.config.vocab_size - 1), hidden[slot, kept], positions, lengths
        )
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
