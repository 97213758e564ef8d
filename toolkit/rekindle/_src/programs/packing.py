"""A step's plan packed into one integer and one float buffer, and unpacked on the device.

Axes: R decode rows, S prefill sequences, N = R + S, T prefill tokens, W page-table width, L slots (the last is
scratch), C changes of a step, n tables of a call. A step's sizes are fixed by a program's `Layout`; the host writes
through numpy views of the two flat buffers, the device slices them.

Row i < R is a decode row, row R + s the s-th prefill. Empty rows have length 0 and the scratch slot, so that their
results go to the scratch page and the scratch slot.

On accelerators page tables stay on the device: a step brings the changed entries, which are derived from a copy on the
host. 256 rows of 8,192 tokens have 512 KiB of tables, of 128k tokens 8 MiB, that would travel in every step to change
16 entries. On CPU whole tables are passed: a program reads the host's buffers in place.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.records import IntArray, PageMove, Row, StepPlan
from rekindle._src.core.sampling import Sampling, draw_of
from rekindle._src.programs.buckets import PLAIN_VARIANT, Bucket, ProgramVariant, StepSize, StepSpan, prefill_rows
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.features import PLAIN, Features
from rekindle._src.programs.partitioning import Partitioning
from rekindle._src.programs.row_option import Columns, RowFlag, TokenPlaces, drawing_flags
from rekindle._src.programs.step_part import StepInputs, StepPart
from rekindle_kernels import Choice, current_platform

T = TypeVar("T")


Outputs = Sequence[tuple[Feature, Any]]  # of features, on the host: an array, a mapping of arrays, or None
ReadRows = Callable[[StepPlan, np.ndarray, Outputs], tuple[T, ...]]


class PageBatch(NamedTuple):
    """Pages that one call moves."""

    moves: tuple[PageMove, ...]
    places: tuple[int, ...]  # the index of each among the pages of the call
    ids: np.ndarray  # the program's operand: the devices' numbers of the pages, 0 where there is none


class AnyUpload(Protocol):
    """The two buffers of a step; see `Upload`."""

    @property
    def layout(self) -> Layout: ...
    @property
    def sequences(self) -> int: ...
    @property
    def ints(self) -> np.ndarray: ...
    @property
    def floats(self) -> np.ndarray: ...
    @property
    def any_flags(self) -> int: ...
    def pack(self, plan: StepPlan, constants: Constants) -> None: ...


@dataclasses.dataclass(frozen=True)
class StepPacking:
    """The host's numbers of slots and pages, and its arrays, in the form that programs take and return.

    Here both have them alike. `data_shards` has the packing for devices that hold the model several times.
    """

    slots: int  # of requests; the scratch slot follows them
    pages: int  # the scratch page, which is the first one, included

    @classmethod
    def of(cls, config: ResolvedConfig) -> StepPacking:
        """Return the packing for programs with this config."""
        return cls(config.max_requests, config.device_pages)

    @property
    def all_slots(self) -> int:
        """The slots that the host numbers."""
        return self.slots

    @property
    def first_pages(self) -> tuple[int, ...]:
        """The host's number of the first page in each pool."""
        return (0,)

    def features(self, make: Callable[[], Features]) -> Features:
        """Return all features, which `make` returns for one program."""
        return make()

    def upload(self, layout: Layout, sent: SentTables | None) -> AnyUpload:
        """Return new buffers for a step."""
        return Upload(layout, sent=sent)

    def size(self, plan: StepPlan) -> StepSize:
        """Return the least size of a program for a plan."""
        return StepSize(len(plan.first_decode), len(plan.prefill), plan.prefill_tokens)

    def tokens(self, bucket: Bucket) -> int:
        """Return how many tokens a step computes, padding included."""
        return bucket.cost

    def admission(self, ints: np.ndarray, floats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `request_state.admit`'s operands for all devices; the arguments are for one slot."""
        return ints, floats

    def parts(self, plan: StepPlan, array: np.ndarray) -> Iterable[tuple[StepPlan, np.ndarray]]:
        """Return each part of a plan, with its view of an array by rows of a program."""
        return ((plan, array),)

    def results(self, plan: StepPlan, rows: np.ndarray, outputs: Outputs, read: ReadRows[T]) -> tuple[T, ...]:
        """Read a step's rows and outputs by `read`. Return its results in the order of the plan's rows."""
        return read(plan, rows, outputs)

    def batches(self, moves: Sequence[PageMove], sizes: Sequence[int]) -> Iterator[PageBatch]:
        """Yield the moves in batches: as many pages as the largest size that they fill, or the smallest."""
        begin = 0
        while begin < len(moves):
            most = next((size for size in sizes if size <= len(moves) - begin), sizes[-1])
            batch = tuple(moves[begin : begin + most])
            ids = np.zeros(most, np.int32)
            ids[: len(batch)] = [move.page for move in batch]
            yield PageBatch(batch, tuple(range(len(batch))), ids)
            begin += most

    def pages_of(self, ids: np.ndarray) -> int:
        """Return the size of the program that moves pages with these `PageBatch.ids`."""
        return len(ids)

    def page_id(self, page: int) -> int:
        """Return the device's number of a page."""
        return page

    def in_call(self, pages: Mapping[int, T], places: int, join: Callable[[list[T]], T]) -> list[T]:
        """Return the values of pages by their places in a batch, of `places`, in the order that a call takes them."""
        return list(pages.values())


PUT = 4  # whole tables that one call writes
_NOTHING: IntArray = np.empty(0, np.int32)


def tables_stay(parts: Partitioning) -> bool:
    """True if page tables stay on the device: there is one device, and it is no CPU."""
    return current_platform() != "cpu" and not parts.divided


def put_tables(tables: Array, ints: Array) -> Array:
    """Return the tables with n whole ones [n * (1 + W)] written, each preceded by its slot."""
    rows = ints.reshape(-1, 1 + tables.shape[1])
    return tables.at[rows[:, 0]].set(rows[:, 1:], mode="promise_in_bounds")


class SentTables:
    """The tables by slot, after the steps that were dispatched.

    A sequence gets a page about every 16 tokens, and its rows share one array as long as none is added. So most rows
    are known to be unchanged without looking at their pages.
    """

    def __init__(self, slots: int, width: int) -> None:
        """Make tables for `slots`, without the scratch slot. `width` is how many pages a sequence may have."""
        self._scratch, self._width = slots, width
        self._sent: list[IntArray] = [_NOTHING] * slots
        self._new: dict[int, IntArray] = {}
        self.whole: list[tuple[int, IntArray]] = []  # slots, and tables with too many changes: written before the step

    def write(self, rows: Sequence[Row], changes: IntArray) -> None:
        """Fill the `changes` [3, C] of a step with its rows' changes: slots, places and pages."""
        sent, most = self._sent, changes.shape[1]
        self._new = {row.slot: row.pages for row in rows if row.pages is not sent[row.slot]}
        self.whole = []
        end = 0
        for slot, pages in self._new.items():
            places = _changed(sent[slot][: self._width], pages[: self._width])
            start, end = end, end + len(places)
            if end > most:
                self.whole.append((slot, pages[: self._width]))
                end = start
                continue
            changes[0, start:end], changes[1, start:end], changes[2, start:end] = slot, places, pages[places]
        changes[0, end:], changes[1:, end:] = self._scratch, 0  # the scratch slot reads page 0

    def packed_whole(self, rows: int) -> list[IntArray]:
        """Return the whole tables in the form that `put_tables` takes, `rows` at a time."""
        batches = []
        for first in range(0, len(self.whole), rows):
            packed = np.zeros((rows, 1 + self._width), np.int32)
            packed[:, 0] = self._scratch
            for index, (slot, pages) in enumerate(self.whole[first : first + rows]):
                packed[index, 0], packed[index, 1 : 1 + len(pages)] = slot, pages
            batches.append(packed.reshape(-1))
        return batches

    def dispatched(self) -> None:
        """Record that the step written last was dispatched: the next one brings only the changes after it."""
        for slot, pages in self._new.items():
            self._sent[slot] = pages

    def forget(self) -> None:
        """Forget all tables: they were made anew, or the changes of a step are unknown."""
        self._sent = [_NOTHING] * self._scratch


def _changed(old: IntArray, new: IntArray) -> IntArray:
    """Return the places where `new` has another page than `old`, or where `old` has none."""
    common = min(len(old), len(new))
    places: IntArray = np.flatnonzero(new[:common] != old[:common]).astype(np.int32)
    if len(new) > common:
        places = np.concatenate([places, np.arange(common, len(new), dtype=np.int32)])
    return places


_HOTTEST = float(np.finfo(np.float32).max)  # an option beyond it would be infinite, which divides -inf to NaN
_VARYING, _CONSTANT = 4, 4  # columns of integers in addition to features' own
DRAWING = 3  # columns of floats in addition to features' own: see `drawing_floats`
TOKENS_PER_CHANGE = 4  # of a new prompt: its first step brings all its pages, mostly of 16 tokens
# Plain integers, since each operation on an enum.IntFlag takes a microsecond.
_SAMPLES, _KEPT, _CHOOSES = int(RowFlag.SAMPLES), int(RowFlag.KEPT), int(RowFlag.SAMPLES | RowFlag.CHOOSES)
_DRAFT = int(RowFlag.DRAFT)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a program, which fix the offsets in its upload buffers."""

    rows: int
    prefills: int
    tokens: int
    width: int  # pages per sequence
    slots: int  # of requests; the scratch slot follows them
    changes: int = 0  # the most changes of resident page tables in a step; 0: a step brings whole tables
    features: Features = dataclasses.field(default=PLAIN, compare=False)
    variants: ProgramVariant = PLAIN_VARIANT
    repeats: bool = False  # the program takes as many steps as its upload says; see `repeated`

    @classmethod
    def of(
        cls, bucket: Bucket, *, max_requests: int, width: int, resident: bool = False, features: Features = PLAIN
    ) -> Layout:
        """Return the layout of a bucket. With `resident`, page tables stay on the device."""
        sequences = bucket.rows + prefill_rows(bucket.tokens, max_requests)
        changes = 2 * sequences + bucket.tokens // TOKENS_PER_CHANGE if resident else 0
        prefills, repeats = sequences - bucket.rows, bucket.span is StepSpan.REPEATED
        sizes = bucket.rows, prefills, bucket.tokens, width, max_requests, changes
        return cls(*sizes, features, bucket.variants, repeats)

    @property
    def sequences(self) -> int:
        return self.rows + self.prefills

    @property
    def compiled(self) -> tuple[Feature, ...]:
        """The features that the program contains."""
        return self.features.compiled(self.variants)

    def compiled_with(self, own: tuple[object, ...]) -> list[tuple[StepPart, object]]:
        """Return the parts that the program contains, with their inputs."""
        entries, compiled = zip(self.features.entries, own, strict=True), self.compiled
        return [(feature.part, inputs) for feature, inputs in entries if feature in compiled]

    @property
    def sections(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in the integer buffer, in the order of `Sections`.

        Of page tables that stay on the device there are the changes only: their slots, places and pages.
        """
        N = self.sequences
        return (
            (1,),
            (N, _VARYING),
            (N, _CONSTANT + self.features.ints),
            (3, self.changes) if self.changes else (N, self.width),
            (self.prefills + 1,),
            (self.tokens,),
            (len(self.features.per_token), self.tokens),
            (N, self.features.row_ints),
            (int(self.repeats),),
        )

    def places(self, plan: StepPlan) -> list[int]:
        """Return the place of each row's result, in the order of the plan's rows."""
        decode, steps = len(plan.decode), plan.steps
        if steps > 1:  # the device computes a step of all rows, then the next one
            return [step * self.rows + row for row in range(decode // steps) for step in range(steps)]
        return [*range(decode), *range(self.rows, self.rows + len(plan.prefill))]

    @property
    def ints(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.sections)

    @property
    def floats(self) -> int:
        return self.sequences * (DRAWING + len(self.features.neutral))


def columns_of(features: Features) -> tuple[int, np.ndarray]:
    """Return how many constant integers a row has, and the floats of a free slot."""
    return _CONSTANT + features.ints, np.array([0, 1, 0, *features.neutral], np.float32)


class Sections(NamedTuple):
    """The parts of an integer buffer, of numpy or of JAX; numpy's are views."""

    any_flags: Any  # [1]
    varying: Any  # [N, 4]: slot, length, token, flags
    constant: Any  # [N, 4 + features' columns]: prompt length, top_k, both halves of the seed
    table: Any  # [N, W], or [3, C] changes
    offsets: Any  # [S + 1]
    tokens: Any  # [T]
    extra: Any  # [F, T]: of features with integers for each token
    row_extra: Any  # [N, features' columns]: integers that change from row to row
    steps: Any  # [1] in programs that repeat steps, else [0]


def sections(layout: Layout, ints: IntArray | Array) -> Sections:
    """Return the parts of an integer buffer."""
    parts, offset = [], 0
    for shape in layout.sections:
        size = int(np.prod(shape))
        parts.append(ints[offset : offset + size].reshape(shape))
        offset += size
    return Sections(*parts)


def changed_tables(layout: Layout, ints: Array, tables: Array | None) -> Array | None:
    """Return the page tables [L, W] with the changes of a step; None where each step brings its own."""
    if tables is None:
        return None
    slots, places, pages = sections(layout, ints).table
    return tables.at[slots, places].set(pages, mode="promise_in_bounds")


def drawing_floats(sampling: Sampling) -> tuple[float, float, float]:
    """Return the floats of the sampling options that affect how a token is drawn."""
    draw = draw_of(sampling)
    return min(draw.temperature, _HOTTEST), draw.top_p, draw.min_p


def drawing_ints(sampling: Sampling) -> tuple[int, int, int]:
    """Return top_k and the halves of the seed, as int32."""
    seed = sampling.seed or 0
    high, low = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    return min(draw_of(sampling).top_k, 2**31 - 1), int(high), int(low)


def choice_of(floats: Array, top_k: Array, seeds: Array, positions: Array) -> Choice:
    """Return the choice of rows. `floats` [N, …] begin with `drawing_floats`, and `seeds` are int32 [N, 2]."""
    temperature, top_p, min_p = (floats[:, column] for column in range(DRAWING))
    return Choice(temperature, top_k, top_p, min_p, lax.bitcast_convert_type(seeds, jnp.uint32), positions)


class Constants:
    """Values that are constant while a request has its slot, in arrays by slot, so that a step gathers them at once."""

    def __init__(self, slots: int, features: Features = PLAIN) -> None:
        ints, neutral = columns_of(features)
        self.scratch, self._features = slots, features
        self.ints = np.zeros((slots + 1, ints), np.int32)
        self.floats = np.tile(neutral, (slots + 1, 1))
        self.flags = [0] * (slots + 1)
        self.row_flags: list[tuple[Callable[[Row], int], ...]] = [()] * (slots + 1)

    def put(self, row: Row) -> None:
        request, sampling = row.request, row.request.sampling
        assert sampling.seed is not None or sampling.greedy, f"{request.id} draws without a seed"
        ints, floats = self._features.constants(request)
        self.ints[row.slot] = (request.prompt_length, *drawing_ints(sampling), *ints)
        self.floats[row.slot] = (*drawing_floats(sampling), *floats)
        self.flags[row.slot] = drawing_flags(sampling) | self._features.flags(request)
        self.row_flags[row.slot] = self._features.row_flags(request)


class Upload:
    """The two host buffers of one layout; they are written again only after the step that read them has ended.

    Devices with a part of the slots and pages have their own `buffers`, and the numbers where their part begins.
    """

    def __init__(
        self,
        layout: Layout,
        buffers: tuple[np.ndarray, np.ndarray] | None = None,
        *,
        first_slot: int = 0,
        first_page: int = 0,
        sent: SentTables | None = None,
    ) -> None:
        """Make the buffers. With `sent`, page tables stay on the device."""
        assert (sent is None) == (not layout.changes), "the layout says whether page tables stay on the device"
        self.layout, self._first_slot, self._first_page, self._sent = layout, first_slot, first_page, sent
        self.ints, self.floats = buffers or (np.zeros(layout.ints, np.int32), np.zeros(layout.floats, np.float32))
        views = sections(layout, self.ints)
        self._any_flags, self._varying, self._constant, self._table, self._offsets, self._tokens = views[:6]
        self._extra, self._row_extra, self._steps = views[6:]
        self._floats = self.floats.reshape(layout.sequences, -1)
        self._steady, self._history = layout.features.steady, layout.features.history
        self._per_token = tuple(zip(layout.features.per_token, self._extra, strict=True))

    def pack(self, plan: StepPlan, constants: Constants) -> None:
        """Write a plan into the buffers."""
        layout = self.layout
        empty = (constants.scratch, 0, 0, 0)
        self._steps[:] = plan.steps
        decode = [self._columns(row, constants) for row in plan.first_decode]
        prefill = [self._columns(row, constants) for row in plan.prefill]
        varying = decode + [empty] * (layout.rows - len(decode))
        varying += prefill + [empty] * (layout.prefills - len(prefill))
        self._varying[:] = varying
        self._any_flags[0] = functools.reduce(operator.or_, (columns[3] for columns in varying))
        slots = self._varying[:, 0]
        constants.ints.take(slots, axis=0, out=self._constant, mode="clip")
        constants.floats.take(slots, axis=0, out=self._floats, mode="clip")
        if constants.scratch != layout.slots:  # the host numbers more slots than these
            slots -= self._first_slot
            slots[len(decode) : layout.rows] = slots[layout.rows + len(prefill) :] = layout.slots
        if self._sent is None:
            for index, row in enumerate(plan.first_decode):
                self._write_pages(index, row.pages)
            for index, row in enumerate(plan.prefill, start=layout.rows):
                self._write_pages(index, row.pages)
        else:
            self._sent.write(plan.rows, self._table)
        if layout.features.row_ints:
            self._write_row_extra(plan)
        offset = 0
        self._offsets[0] = 0
        if layout.tokens:
            self._extra.fill(-1)
        for index, row in enumerate(plan.prefill):
            assert row.token_ids is not None, "a prefill row has its tokens"
            end = offset + row.length
            self._tokens[offset:end] = row.token_ids
            for option, extra in self._per_token:
                if prefill[index][3] & option.bits:
                    option.write_tokens(row, extra[offset:end])
            offset = end
            self._offsets[index + 1] = offset
        self._offsets[len(prefill) + 1 :] = offset
        self._tokens[offset:] = 0

    @property
    def sequences(self) -> int:
        """The rows of the program, empty ones included."""
        return self.layout.sequences

    @property
    def any_flags(self) -> int:
        """The union of the rows' flags."""
        return int(self._any_flags[0])

    @any_flags.setter
    def any_flags(self, flags: int) -> None:
        self._any_flags[0] = flags

    def _columns(self, row: Row, constants: Constants) -> tuple[int, int, int, int]:
        flags = constants.flags[row.slot]
        if not row.samples:
            flags &= self._steady  # no token is chosen, so that few options have to be computed
        else:
            flags |= _CHOOSES
            for row_flags in constants.row_flags[row.slot]:
                flags |= row_flags(row)
        if row.kept:
            flags |= _KEPT
        if row.draft:
            flags &= ~_SAMPLES  # only the host reads its choice: at most one row writes a slot's last token
            if flags & self._history:
                flags |= _DRAFT
        token = -1 if row.token_ids is None else int(row.token_ids[0])
        return row.slot, row.start + row.length, token, flags

    def _write_row_extra(self, plan: StepPlan) -> None:
        self._row_extra.fill(0)
        rows = [*enumerate(plan.first_decode), *enumerate(plan.prefill, start=self.layout.rows)]
        first = 0
        for option in self.layout.features.per_row:
            option.write_rows(plan, rows, self._row_extra[:, first : first + option.row_ints])
            first += option.row_ints

    def _write_pages(self, index: int, pages: IntArray) -> None:
        used = min(len(pages), self.layout.width)
        self._table[index, :used] = pages[:used]
        if self._first_page:
            self._table[index, :used] -= self._first_page


def unpack(
    layout: Layout, page_size: int, ints: Array, floats: Array, last_token: Array, tables: Array | None = None
) -> StepInputs:
    """Unpack the buffers. A decode row without a token takes its slot's `last_token`, which an earlier step sampled.

    `tables` are the resident page tables, with the step's changes.
    """
    R, S, T = layout.rows, layout.prefills, layout.tokens
    any_flags, varying, constant, table, cu, tokens, extra, row_extra, _ = sections(layout, ints)
    slots, lengths, row_tokens, flags = (varying[:, column] for column in range(_VARYING))
    if tables is not None:
        table = tables[slots]
    prompt_lengths, top_k = constant[:, 0], constant[:, 1]
    values = floats.reshape(layout.sequences, -1)
    decode_tokens = jnp.where(row_tokens[:R] >= 0, row_tokens[:R], last_token[slots[:R]])
    decode_positions = jnp.maximum(lengths[:R] - 1, 0)
    rows, valid = lax.iota(jnp.int32, R), (lengths[:R] > 0) & (flags[:R] & RowFlag.KEPT == 0)
    last = rows
    if T:
        index = lax.iota(jnp.int32, T)
        sequence = (index[:, None] >= cu[1:]).astype(jnp.int32).sum(axis=1)  # S for padding
        inside = sequence < S
        sequence = jnp.minimum(sequence, S - 1)
        ends = lengths[R:][sequence]
        positions = jnp.where(inside, ends - cu[1:][sequence] + index, 0)
        tokens_all = jnp.concatenate([decode_tokens, tokens])
        positions = jnp.concatenate([decode_positions, positions])
        owners = jnp.concatenate([rows, R + sequence])
        valid = jnp.concatenate([valid, inside])
        last = jnp.concatenate([rows, R + jnp.maximum(cu[1:] - 1, 0)])
    else:
        tokens_all, positions, owners = decode_tokens, decode_positions, rows
    places = positions // page_size
    pages = table[owners, places]
    own = _own(layout, flags, constant, values, extra, row_extra)
    return StepInputs(
        slots=slots,
        lengths=lengths,
        tokens=tokens_all,
        positions=positions,
        page_ids=jnp.where(valid, pages, 0),
        offsets=jnp.where(valid, positions % page_size, 0),
        prompt_lengths=prompt_lengths[owners],
        page_table=table,
        cu_lengths=cu,
        num_prefills=(lengths[R:] > 0).astype(jnp.int32).sum(),
        last=last,
        flags=flags,
        any_flags=any_flags[0],
        choice=choice_of(values, top_k, constant[:, 2:4], lengths),
        own=own,
        sides=layout.features.for_layers(
            own, TokenPlaces(valid, owners, places, layout.width, drafts=ProgramVariant.DRAFTS in layout.variants)
        ),
    )


def _own(layout: Layout, flags: Array, ints: Array, floats: Array, extra: Array, row_extra: Array) -> tuple[Any, ...]:
    """Return the inputs of each feature. They are the same in all variants, which share openings; see `layered`."""
    tokens = dict(zip(layout.features.per_token, extra, strict=True))
    starts, own = [_CONSTANT, 0, DRAWING], []
    for option in layout.features.options:
        parts: list[Array | None] = []
        for index, (columns, count) in enumerate(
            ((ints, option.ints), (row_extra, option.row_ints), (floats, len(option.neutral)))
        ):
            start = starts[index]
            parts.append(columns[:, start : start + count] if count else None)
            starts[index] += count
        own.append(option.unpack(Columns._make((flags, *parts, tokens.get(option)))))
    return tuple(own)
