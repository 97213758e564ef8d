"""Entries that a head which drafts keeps of every token, in its own layers of the pages: written at once, or later.

Entries cost a small part of a layer. While no row drafts, a step of decode rows runs the same program as without a
head, which stores what the head reads of each row's token but no entries. The next step that computes entries, at the
latest after `MOST_MISSING` tokens, adds the missing ones, all of a row at once, so that the head's matrices are read
only once.

Axes: N rows, T tokens, F what a head reads of a token.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.records import HIDDEN_KEPT, EntryLag, IntArray, Row, StepPlan
from rekindle._src.models.base import Model
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.feature import ChosenStep, Columns, Feature
from rekindle._src.programs.request_state import RequestState
from rekindle_kernels import LayerKV, write_kv

HeadPages = tuple[LayerKV, ...]
Entry = tuple[Array, Array | None]  # keys and values [T, K, D] of a layer; latent pages have no values
Inputs = TypeVar("Inputs")


class EntryInputs(NamedTuple):
    """The integers of each row."""

    missing: Array  # [N]: earlier tokens whose entries the head has not computed yet


class EarlierTokens(NamedTuple):
    """Tokens of one row in earlier steps: what the session keeps of them, and where."""

    read: Array  # [T, F]
    slot: Array  # of the request
    kept: Array  # [T]: their places among the kept tokens of the slot
    positions: Array  # [T]
    lengths: Array  # [T]: as `StepInputs.rope_lengths`


class KeptEntries(Feature[Inputs, tuple[()]], abc.ABC):
    """Writes the head's entries for a step's tokens, and for earlier tokens of its rows that lack them."""

    row_ints, follows = 1, True
    variant, warmed = ProgramVariant.DRAFTS, True
    inside = True  # it needs pages after the choice, which programs made of parts have given away

    def __init__(self, layers: int = 1) -> None:
        """`layers` are those of the head."""
        self._layers = layers

    def in_plan(self, plan: StepPlan) -> bool:
        return plan.entries is not None or bool(plan.prefill)

    def write_rows(self, plan: StepPlan, rows: Sequence[tuple[int, Row]], out: IntArray) -> None:
        if plan.entries is not None:
            for place, row in rows:
                if not row.draft:
                    self.write_lag(plan.entries[row.slot], out[place])

    def write_lag(self, lag: EntryLag, out: IntArray) -> None:
        """Write the integers of a row that is no draft, each 0 so far."""
        out[0] = min(lag.missing, HIDDEN_KEPT)

    @abc.abstractmethod
    def unpack(self, columns: Columns) -> Inputs:
        """Return the inputs of each row. Its first column is `EntryInputs.missing`."""

    @abc.abstractmethod
    def entries(self, step: ChosenStep) -> Sequence[Entry]:
        """Compute the entries of a step's tokens in each layer of the head."""

    @abc.abstractmethod
    def earlier_entries(self, model: Model, state: RequestState, tokens: EarlierTokens) -> Sequence[Entry]:
        """Compute those of tokens of earlier steps."""

    def follow(self, step: ChosenStep, kv: paged.KV) -> paged.KV:
        pages = self._caught_up(step, head_pages(kv, self._layers))
        return with_head_pages(kv, _written(pages, self.entries(step), step.inputs.page_ids, step.inputs.offsets))

    def _caught_up(self, step: ChosenStep, pages: HeadPages) -> HeadPages:
        """Return the head's pages with the entries that the tokens before each decode row lack."""
        inputs, hidden, missing, size = step.inputs, step.state.hidden, step.own.missing, pages[0].page_size
        assert hidden is not None, "a session whose model has a head keeps what it reads"
        (waiting,) = jnp.nonzero(missing > 0, size=missing.shape[0], fill_value=0)

        def catch_up(number: Array, pages: HeadPages) -> HeadPages:
            row = waiting[number]
            slot, place = inputs.slots[row], lax.iota(jnp.int32, HIDDEN_KEPT)
            lacks_entry = place < missing[row]
            positions = jnp.where(lacks_entry, inputs.lengths[row] - 1 - missing[row] + place, 0)
            kept = positions % HIDDEN_KEPT
            lengths = jnp.maximum(inputs.prompt_lengths[inputs.last[row]], positions + 1)
            tokens = EarlierTokens(hidden[slot, kept], slot, kept, positions, lengths)
            entries = self.earlier_entries(step.model, step.state, tokens)
            page_ids = jnp.where(lacks_entry, inputs.page_table[row, positions // size], 0)
            return _written(pages, entries, page_ids, jnp.where(lacks_entry, positions % size, 0))

        caught: HeadPages = lax.fori_loop(0, (missing > 0).astype(jnp.int32).sum(), catch_up, pages)
        return caught


def head_pages(kv: paged.KV, layers: int) -> HeadPages:
    """Return the pages of a head's layers, which are the last ones."""
    pages = paged.pages_of(kv[-layers:])
    assert len(pages) == layers, "each layer of a head has pages"
    return pages


def with_head_pages(kv: paged.KV, pages: Sequence[LayerKV]) -> paged.KV:
    """Return all layers, with these pages of a head."""
    count = len(pages)
    return *kv[:-count], *(layer._replace(pages=own) for layer, own in zip(kv[-count:], pages, strict=True))


def _written(pages: HeadPages, entries: Sequence[Entry], page_ids: Array, offsets: Array) -> HeadPages:
    return tuple(write_kv(layer, k, v, page_ids, offsets) for layer, (k, v) in zip(pages, entries, strict=True))
