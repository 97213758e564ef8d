"""Entries of a draft head for every token, in its own layers of the pages: written at once, or later.

Entries cost a small part of a layer. While no row drafts, a step of decode rows runs the same program as without a
head, which stores what the head reads of each row's token but no entries. The next step that computes entries, at the
latest after `MOST_MISSING` tokens, adds the missing ones, all of a row at once, so that the head's matrices are read
only once. Which entries a head has of a request is known to its rule on the host, `EntryDrafter`.

Axes: N rows, T tokens, F what a head reads of a token.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.dtypes import DType
from rekindle._src.core.records import HIDDEN_KEPT, MOST_MISSING, DraftTask, EntryLag, IntArray, Row, StepPlan
from rekindle._src.drafts.calls import DraftLayout, TargetCalls
from rekindle._src.drafts.checkpoint import DraftCheckpoint, DraftShapes, Target, refuse
from rekindle._src.drafts.hidden import HiddenDrafter
from rekindle._src.drafts.kind import DraftKind, DraftOpening
from rekindle._src.drafts.weights import DraftWeights, deleted, take
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.models.base import Graph, merge
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.drafting import DraftPrograms
from rekindle._src.programs.partitioning import PAGES, ROWS, WEIGHTS, Recipe
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import Columns, RowOption
from rekindle._src.programs.step_part import ChosenStep, StepPart
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.sequence import Limits, Sequence
from rekindle_kernels import LayerKV, write_kv

FIX = "Use the head that was made for this model"
HeadPages = tuple[LayerKV, ...]
Entry = tuple[Array, Array | None]  # keys and values [T, K, D] of a layer; latent pages have no values
Inputs = TypeVar("Inputs", bound="LagInputs")
EntryStep = ChosenStep[Inputs, tuple[Array, ...]]


class LagInputs(Protocol):
    """The integers of each row that all heads have."""

    @property
    def missing(self) -> Array: ...


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


class EntryRows(RowOption[Inputs], abc.ABC):
    """Rows of a head: earlier tokens without its entries."""

    row_ints = 1

    def in_plan(self, plan: StepPlan) -> bool:
        return plan.entries is not None or bool(plan.prefill)

    def write_rows(self, plan: StepPlan, rows: Items[tuple[int, Row]], out: IntArray) -> None:
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


class KeptEntries(StepPart[Inputs, tuple[Array, ...]], abc.ABC):
    """Writes the head's entries for a step's tokens, and for earlier tokens of its rows that lack them."""

    follows = True
    variant, warmed = ProgramVariant.DRAFTS, True
    inside = True  # it needs pages after the choice, which programs made of parts have given away

    def __init__(self, shapes: DraftShapes) -> None:
        self._shapes, self._layers = shapes, len(shapes.graph.config.caches)
        self.operand_layout, self.streams = shapes.layout, shapes.graph.config.reads

    @property
    def operand_shapes(self) -> object:
        return self._shapes.leaves

    def hold(self, leaves: tuple[Array, ...]) -> None:
        """Take the head's leaves, or others in their place."""
        self.operands = leaves

    @abc.abstractmethod
    def entries(self, head: Any, step: EntryStep[Inputs]) -> Items[Entry]:
        """Compute the entries of a step's tokens in each layer of the `head`."""

    @abc.abstractmethod
    def earlier_entries(self, head: Any, step: EntryStep[Inputs], tokens: EarlierTokens) -> Items[Entry]:
        """Compute the entries of tokens from earlier steps."""

    def follow(self, step: EntryStep[Inputs], kv: paged.KV) -> paged.KV:
        head = merge(self._shapes.graph, step.operands)
        pages = self._caught_up(head, step, head_pages(kv, self._layers))
        return with_head_pages(kv, _written(pages, self.entries(head, step), step.inputs.page_ids, step.inputs.offsets))

    def _caught_up(self, head: Any, step: EntryStep[Inputs], pages: HeadPages) -> HeadPages:
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
            entries = self.earlier_entries(head, step, tokens)
            page_ids = jnp.where(lacks_entry, inputs.page_table[row, positions // size], 0)
            return _written(pages, entries, page_ids, jnp.where(lacks_entry, positions % size, 0))

        caught: HeadPages = lax.fori_loop(0, (missing > 0).astype(jnp.int32).sum(), catch_up, pages)
        return caught


def head_pages(kv: paged.KV, layers: int) -> HeadPages:
    """Return the pages of a head's layers, which are the last ones."""
    pages = paged.pages_of(kv[-layers:])
    assert len(pages) == layers, "each layer of a head has pages"
    return pages


def with_head_pages(kv: paged.KV, pages: Items[LayerKV]) -> paged.KV:
    """Return all layers, with these pages of a head."""
    count = len(pages)
    return *kv[:-count], *(layer._replace(pages=own) for layer, own in zip(kv[-count:], pages, strict=True))


def _written(pages: HeadPages, entries: Items[Entry], page_ids: Array, offsets: Array) -> HeadPages:
    return tuple(write_kv(layer, k, v, page_ids, offsets) for layer, (k, v) in zip(pages, entries, strict=True))


@dataclasses.dataclass(frozen=True)
class EntryCalls(TargetCalls):
    """The programs of a head, which writes entries of its drafts into the pages."""

    shapes: DraftShapes

    def _recipe(self, layout: DraftLayout, arguments: tuple[Any, ...]) -> Recipe:
        operands = (self.shapes.layout, WEIGHTS, PAGES, ROWS, ROWS, ROWS)
        draft = functools.partial(self._draft, layout)
        return Recipe(draft, (self.shapes.leaves, *arguments), (2,), operands, (PAGES, ROWS))

    @abc.abstractmethod
    def _draft(
        self,
        layout: DraftLayout,
        leaves: Items[Array],
        target_leaves: Items[Array],
        kv: paged.KV,
        state: RequestState,
        ints: Array,
        floats: Array,
    ) -> tuple[paged.KV, Array]:
        """Draft tokens [N, DRAFTS] for all rows. Those beyond a row's number are undefined."""


class EntryPrograms(DraftPrograms, abc.ABC):
    """Adds a head to a session's programs: its entries in steps and pages, and calls that draft."""

    def __init__(self, shapes: DraftShapes, config: ModelConfig) -> None:
        """`config` describes the whole head, `shapes` one device's part of it."""
        self.shapes, self.reads = shapes, config.reads
        self.pages = tuple(config.pages_of(layer) for layer in range(config.num_layers))

    def facts(self) -> dict[str, object]:
        return {"drafter": self.shapes.facts()}


class HeadWeights(DraftWeights):
    """Calls the programs of the model's own head. Its leaves belong to the model and change with it."""

    def __init__(self, programs: Programs, load: Callable[[], Items[Array]]) -> None:
        super().__init__(programs, load)
        self._hold(self._leaves)

    def work(self, tasks: Items[DraftTask], calls: DeviceCalls) -> bool:
        program, ints, floats = self._drafting(tasks)
        take(tasks, calls.write_ahead(program, self._leaves, ints, floats))
        return True

    def _hold(self, leaves: tuple[Array, ...]) -> None:
        self._leaves = leaves
        for part in self._programs.features.parts:
            if isinstance(part, KeptEntries):
                part.hold(leaves)

    def wake(self) -> None:
        self._hold(tuple(self._load()))

    def swapped(self) -> None:
        self.wake()

    def _free(self) -> int:
        self._hold(())
        return 0


class LoadedHead(HeadWeights):
    """Weights of a head with its own checkpoint. They stay when the model's change, and sleep in host memory."""

    def __init__(self, programs: Programs, load: Callable[[], Items[Array]]) -> None:
        super().__init__(programs, load)
        self._asleep: list[tuple[np.ndarray, Any]] = []  # with the place of each on the device

    def sleep(self) -> int:
        self._asleep = [(np.array(leaf), leaf.sharding if leaf.committed else None) for leaf in self._leaves]
        return self._free()

    def wake(self) -> None:
        asleep, self._asleep = self._asleep, []
        self._hold(tuple(jax.device_put(array, place) for array, place in asleep))

    def swapped(self) -> None:
        pass

    def _free(self) -> int:
        leaves = self._leaves
        self._hold(())
        return deleted(leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class OtherHeadKind(DraftKind):
    """A drafter that is a head with a checkpoint of its own."""

    name: str
    words: str
    checkpoint: DraftCheckpoint
    programs: EntryPrograms

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        return self.checkpoint.device_bytes

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.checkpoint.fingerprint

    @property
    def mark(self) -> str:  # type: ignore[override]
        return f"-with-head-{self.checkpoint.fingerprint}"

    def drafter(self, limits: Limits) -> Drafter:
        return EntryDrafter(self.name, self.words, limits.max_model_len)

    def open(self, opening: DraftOpening) -> DraftWeights:
        return LoadedHead(opening.programs, self.load)

    def load(self) -> tuple[Array, ...]:
        """Read its leaves. Raise CheckpointError for some that can't draft."""
        return self.checkpoint.load().leaves


def fitted(checkpoint: DraftCheckpoint, target: Target, reads: tuple[int, ...], size: int) -> DraftCheckpoint:
    """Return the checkpoint of a head in its model's precision. The head reads layers of `size` from the model.

    Raise ConfigError if it was made for another model.
    """
    model, fix = target.model, FIX
    if target.placement.divided:
        problem = "is a head of another checkpoint, which can't be divided over devices"
        refuse(checkpoint.name, problem, "Use one device")
    if model.draft_head is not None:
        problem = f"is a head, and this {model.model_type} model has one of its own"
        refuse(checkpoint.name, problem, 'Use drafts="mtp"')
    if not all(0 <= layer <= model.num_layers for layer in reads):
        shown = ", ".join(map(str, reads))[:80]
        refuse(checkpoint.name, f"reads the layers {shown}, and this model has {model.num_layers}", fix)
    if size != model.hidden_size:
        problem = f"drafts for a model whose hidden states have {size:,} numbers, and this one's have"
        refuse(checkpoint.name, f"{problem} {model.hidden_size:,}", fix)
    dtype = cast(DType, target.graph.precision.weights)
    if checkpoint.plan.graph.precision.weights != dtype:  # it computes with the model's states
        checkpoint = DraftCheckpoint.describe(checkpoint.name, checkpoint.folder, target, dtype)
    return checkpoint


def shapes_in(graph: Graph, target: Target, leaves: tuple[jax.ShapeDtypeStruct, ...], **changes: Any) -> DraftShapes:
    """Return the shapes of a head on one device, which is as deterministic as its model; `changes` are its config's."""
    config = dataclasses.replace(graph.config, **changes)
    precision = dataclasses.replace(graph.precision, deterministic=target.config.deterministic)
    return DraftShapes(Graph(config, precision, graph.paths), leaves)


class _EntryCount(NamedTuple):
    """The leading tokens of a request that a head has entries of, in an epoch of the request."""

    epoch: int
    tokens: int


class EntryDrafter(HiddenDrafter):
    """Plans the work of a head. It drafts where no entry is missing."""

    def __init__(self, name: str, words: str, positions: int, block: int = 0) -> None:
        """`block` is the number of tokens of a block, the last one of the text included; 0: it drafts no blocks."""
        super().__init__(name, words, positions)
        self.reach = max(0, block - 1)
        self.bound = HIDDEN_KEPT - MOST_MISSING - 1  # a step keeps the states of all its rows
        self._entered: dict[Sequence, _EntryCount] = {}

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence.has_hidden and self.entered(sequence) >= sequence.tokens.known - 1

    def room(self, sequence: Sequence) -> int:
        """Return the same: a block is drafted whole or not at all."""
        room = super().room(sequence)
        return room if room >= self.reach else 0

    def entered(self, sequence: Sequence) -> int:
        """Return of how many leading tokens it has entries, or does without."""
        known = self._entered.get(sequence)
        return sequence.epoch.cached if known is None or known.epoch != sequence.epoch.number else known.tokens

    def entries(self, sequences: Items[Sequence], rows: Items[Row], *, enters: bool) -> dict[int, EntryLag] | None:
        """Plan entries for a step with prompts or drafts, or with a row that lacks `MOST_MISSING` entries."""
        lags = dict[int, EntryLag]()
        for sequence, row in zip(sequences, rows, strict=True):
            if row.draft:
                enters = True
                continue
            end, missing = row.start + row.length, row.start - self.entered(sequence)
            follows = end < sequence.tokens.known and not row.samples
            lags[row.slot] = EntryLag(missing, int(sequence.tokens.values(end, end + 1)[0]) if follows else -1)
            enters = enters or missing >= MOST_MISSING
        if not enters:
            return None
        for sequence, row in zip(sequences, rows, strict=True):
            self._entered[sequence] = _EntryCount(sequence.epoch.number, row.start + row.length)
        return lags

    def checked(self, sequence: Sequence) -> None:
        if sequence in self._entered:  # one that has ended with this step is forgotten
            self._entered[sequence] = _EntryCount(
                sequence.epoch.number, min(self.entered(sequence), sequence.epoch.planned)
            )

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._entered.pop(sequence, None)
