"""A step's plan packed into one integer and one float buffer, and unpacked on the device.

Axes: R decode rows, S prefill sequences, N = R + S, T prefill tokens, W page-table width. They are fixed by a
program's `Layout`; the host writes through numpy views of the two flat buffers, the device slices them.

Row i < R is a decode row, row R + s the s-th prefill. Empty rows have length 0 and the scratch slot, so that their
results go to the scratch page and the scratch slot.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.records import IntArray, Row, StepPlan
from rekindle._src.programs.buckets import Bucket, prefill_rows
from rekindle._src.programs.flags import Flag, flags_of
from rekindle._src.programs.logit_shaping import Shaping
from rekindle._src.programs.sent_tables import SentTables
from rekindle_kernels import Choice

# Options are Python floats. Beyond float32 a temperature would be infinite, which numpy warns of and which divides
# -inf to NaN, and a repetition penalty would be 0, which is divided by.
_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_VARYING, _CONSTANT, _FLOATS = 4, 4, 6  # columns
TOKENS_PER_CHANGE = 4  # of a new prompt: its first step brings all its pages, mostly of 16 tokens
NEUTRAL = np.array([0, 1, 0, 1, 0, 0], np.float32)  # the float options of a free slot
# Plain integers, since each operation on an enum.IntFlag takes a microsecond.
_PROMPT, _SAMPLES, _KEPT = int(Flag.PROMPT_LOGPROBS), int(Flag.SAMPLES), int(Flag.KEPT)
_CHOOSES = int(Flag.SAMPLES | Flag.CHOOSES)
_CHOOSES_BARRED = int(Flag.SAMPLES | Flag.CHOOSES | Flag.BARRED)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a program, which fix the offsets in its upload buffers."""

    rows: int
    prefills: int
    tokens: int
    width: int  # pages per sequence
    slots: int  # of requests; the scratch slot follows them
    changes: int = 0  # the most changes of resident page tables in a step; 0: a step brings whole tables

    @classmethod
    def of(cls, bucket: Bucket, *, max_requests: int, width: int, resident: bool = False) -> Layout:
        """Return the layout of a bucket. With `resident`, page tables stay on the device; see `page_tables`."""
        sequences = bucket.rows + prefill_rows(bucket.tokens, max_requests)
        changes = 2 * sequences + bucket.tokens // TOKENS_PER_CHANGE if resident else 0
        return cls(bucket.rows, sequences - bucket.rows, bucket.tokens, width, max_requests, changes)

    @property
    def sequences(self) -> int:
        return self.rows + self.prefills

    @property
    def sections(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in the integer buffer: features, varying, constant, page table, prefill offsets, tokens, targets.

        Of page tables that stay on the device there are the changes only: their slots, places and pages.
        """
        N = self.sequences
        return (
            (1,),
            (N, _VARYING),
            (N, _CONSTANT),
            (3, self.changes) if self.changes else (N, self.width),
            (self.prefills + 1,),
            (self.tokens,),
            (self.tokens,),
        )

    @property
    def ints(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.sections)

    @property
    def floats(self) -> int:
        return self.sequences * _FLOATS


class Sections(NamedTuple):
    """The parts of an integer buffer, of numpy or of JAX; numpy's are views."""

    features: Any  # [1]
    varying: Any  # [N, 4]: slot, length, token, flags
    constant: Any  # [N, 4]: prompt length, top_k, both halves of the seed
    table: Any  # [N, W], or [3, C] changes
    offsets: Any  # [S + 1]
    tokens: Any  # [T]
    targets: Any  # [T]


def sections(layout: Layout, ints: Any) -> Sections:
    """Return the parts of an integer buffer."""
    parts, offset = [], 0
    for shape in layout.sections:
        size = int(np.prod(shape))
        parts.append(ints[offset : offset + size].reshape(shape))
        offset += size
    return Sections(*parts)


class Constants:
    """Values that are constant while a request has its slot, in arrays by slot, so that a step gathers them at once."""

    def __init__(self, slots: int, processors: tuple[str, ...]) -> None:
        self.scratch = slots
        self.ints = np.zeros((slots + 1, _CONSTANT), np.int32)
        self.floats = np.tile(NEUTRAL, (slots + 1, 1))
        self.flags = [0] * (slots + 1)
        self._processors = {name: index for index, name in enumerate(processors)}

    def put(self, row: Row) -> None:
        sampling, seed = row.request.sampling, row.request.sampling.seed
        assert seed is not None or sampling.greedy, f"{row.request.id} draws without a seed"
        halves = np.array([(seed or 0) >> 32, (seed or 0) & 0xFFFFFFFF], np.uint32).view(np.int32)
        self.ints[row.slot] = (row.request.prompt_length, min(sampling.top_k, 2**31 - 1), *halves)
        self.floats[row.slot] = (
            min(sampling.temperature, _LARGEST),
            sampling.top_p,
            sampling.min_p,
            min(max(sampling.repetition_penalty, _SMALLEST), _LARGEST),
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self.flags[row.slot] = flags_of(sampling, self._processors)


class Upload:
    """The two host buffers of one layout; they are written again only after the step that read them has ended.

    A data shard has its own `buffers`, and the numbers at which its slots and pages begin.
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
        self._features, self._varying, self._constant, self._table, self._offsets, self._tokens, self._targets = views
        self._floats = self.floats.reshape(layout.sequences, _FLOATS)

    def pack(self, plan: StepPlan, constants: Constants) -> None:
        """Write a plan into the buffers."""
        layout = self.layout
        empty = (constants.scratch, 0, 0, 0)
        decode = [self._columns(row, constants) for row in plan.decode]
        prefill = [self._columns(row, constants) for row in plan.prefill]
        varying = decode + [empty] * (layout.rows - len(decode))
        varying += prefill + [empty] * (layout.prefills - len(prefill))
        self._varying[:] = varying
        self._features[0] = functools.reduce(operator.or_, (columns[3] for columns in varying))
        slots = self._varying[:, 0]
        constants.ints.take(slots, axis=0, out=self._constant, mode="clip")
        constants.floats.take(slots, axis=0, out=self._floats, mode="clip")
        if constants.scratch != layout.slots:  # slots are numbered across all shards
            slots -= self._first_slot
            slots[len(decode) : layout.rows] = slots[layout.rows + len(prefill) :] = layout.slots
        if self._sent is None:
            for index, row in enumerate(plan.decode):
                self._write_pages(index, row.pages)
            for index, row in enumerate(plan.prefill, start=layout.rows):
                self._write_pages(index, row.pages)
        else:
            self._sent.write(plan.rows, self._table)
        offset = 0
        self._offsets[0] = 0
        if layout.tokens:
            self._targets.fill(-1)
        for index, row in enumerate(plan.prefill):
            assert row.token_ids is not None, "a prefill row has its tokens"
            end = offset + row.length
            self._tokens[offset:end] = row.token_ids
            if row.request.sampling.prompt_logprobs is not None:
                following = row.request.token_ids[row.start + 1 : row.start + row.length + 1]
                self._targets[offset : offset + len(following)] = following
            offset = end
            self._offsets[index + 1] = offset
        self._offsets[len(prefill) + 1 :] = offset
        self._tokens[offset:] = 0

    @property
    def features(self) -> int:
        """The union of the rows' flags."""
        return int(self._features[0])

    @features.setter
    def features(self, flags: int) -> None:
        self._features[0] = flags

    def _columns(self, row: Row, constants: Constants) -> tuple[int, int, int, int]:
        flags = constants.flags[row.slot]
        if not row.samples:
            flags &= _PROMPT  # no token is chosen, so that no option has to be computed
        elif row.generated < row.request.sampling.min_tokens:
            flags |= _CHOOSES_BARRED
        else:
            flags |= _CHOOSES
        if row.kept:
            flags |= _KEPT
        if row.draft:
            flags &= ~_SAMPLES  # only the host reads its choice: at most one row writes a slot's state
        token = -1 if row.token_ids is None else int(row.token_ids[0])
        return row.slot, row.start + row.length, token, flags

    def _write_pages(self, index: int, pages: IntArray) -> None:
        used = min(len(pages), self.layout.width)
        self._table[index, :used] = pages[:used]
        if self._first_page:
            self._table[index, :used] -= self._first_page


class Paging(NamedTuple):
    """The paging of a step for attention: the slots its tokens are written to, and the pages its sequences read."""

    page_ids: Array  # [R + T]
    offsets: Array  # [R + T]
    page_table: Array  # [N, W]
    lengths: Array  # [N]
    cu_lengths: Array  # [S + 1]
    num_prefills: Array  # []


class StepInputs(NamedTuple):
    """The unpacked inputs of a step, on the device."""

    slots: Array  # [N]
    lengths: Array  # [N]: tokens of the sequence, this step's included; 0 in an empty row
    tokens: Array  # [R + T]
    positions: Array  # [R + T]
    page_ids: Array  # [R + T]: the page for each token's keys and values
    offsets: Array  # [R + T]: their place in that page
    prompt_lengths: Array  # [R + T]: of the token's sequence
    page_table: Array  # [N, W]
    cu_lengths: Array  # [S + 1]: half-open offsets of the prefills within the prefill tokens
    num_prefills: Array  # []
    last: Array  # [N]: index of each sequence's last token
    targets: Array  # [T]: the prompt's next token where prompt_logprobs wants it, else -1
    flags: Array  # [N]: flags.Flag of each row
    features: Any  # []: the union of `flags`, or a Flag where it is known while the program is traced
    choice: Choice
    shaping: Shaping

    def flag(self, flag: int) -> Array:
        return (self.flags & flag) != 0

    @property
    def paging(self) -> Paging:
        return Paging(*(getattr(self, name) for name in Paging._fields))

    @property
    def rope_lengths(self) -> Array:
        """The length of the sequence that each token's rope assumes, as in `rope.tables` [R + T]."""
        return jnp.maximum(self.prompt_lengths, self.positions + 1)


def unpack(
    layout: Layout, page_size: int, ints: Array, floats: Array, last_token: Array, tables: Array | None = None
) -> StepInputs:
    """Unpack the buffers. A decode row without a token takes its slot's `last_token`, which an earlier step sampled.

    `tables` are the resident page tables, with the step's changes.
    """
    R, S, T = layout.rows, layout.prefills, layout.tokens
    features, varying, constant, table, cu, tokens, targets = sections(layout, ints)
    slots, lengths, row_tokens, flags = (varying[:, column] for column in range(_VARYING))
    if tables is not None:
        table = tables[slots]
    prompt_lengths, top_k = constant[:, 0], constant[:, 1]
    temperature, top_p, min_p, repetition, presence, frequency = (
        floats.reshape(layout.sequences, _FLOATS)[:, column] for column in range(_FLOATS)
    )
    decode_tokens = jnp.where(row_tokens[:R] >= 0, row_tokens[:R], last_token[slots[:R]])
    decode_positions = jnp.maximum(lengths[:R] - 1, 0)
    rows, valid = lax.iota(jnp.int32, R), (lengths[:R] > 0) & (flags[:R] & Flag.KEPT == 0)
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
    pages = table[owners, positions // page_size]
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
        targets=targets,
        flags=flags,
        features=features[0],
        choice=Choice(
            temperature, top_k, top_p, min_p, lax.bitcast_convert_type(constant[:, 2:4], jnp.uint32), lengths
        ),
        shaping=Shaping(repetition, presence, frequency, (flags & Flag.BIASED) != 0, (flags & Flag.BARRED) != 0),
    )
