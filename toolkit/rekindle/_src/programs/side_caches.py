"""The kinds of side caches: per-sequence data of layers, in addition to pages that stay. One declaration for each.

A kind says how many slots it has on the device, what one entry is there and elsewhere, how entries are keyed in the
tree, how they are read out and filled, which share of host memory they have, under which identity they are stored, and
what a step's rows send for it. Everything else works on the list that `side_caches` returns: the tree
(`kvcache.side`), the rules of the scheduler (`scheduling.side_rules`), transfers, tiers, snapshots, pages between
sessions, and views.

- `RecurrentStates`: a layer's state, which each token changes, stands for all tokens before it. It lies in slots, and a
  row names the one that it reads and the one that it writes.
- `WindowPages`: layers with a window give back the pages that it has passed. They have a page table of their own, with
  the pages that each row still has. A row sends their places. On the device they are spread over a table of all places,
  so that kernels read both tables alike. At places that the window has passed the table names the scratch page, which
  no kernel reads there.

The pages of a small model that drafts are no kind: they lie at the ids of the model's pages, and are computed again
where they lack a text (`drafts.model`).

One more, on paper:

    class EncoderOutputs(DevicePlan):      # of pictures, as rows of the residual stream
        name = "encodings"                 # stored as ", encodings of "
        keying = Keying.CONTENT            # by the digest of the input, which is in the salt of the pages after it
        share, costs = 8, "measured"       # encoding again is a program's time; a copy may be slower
        moved, divided = 1, WHOLE
        # slots: two of the most tokens of an input for each request; step, span: nodes have none and need none
        # leaves: one input's rows, [tokens, hidden]; content: digest of the encoder's weights and preprocessing
        # feature: one integer for each prefill token, its place among the slots; embeddings are replaced there

`CONTENT` is the one thing to add: entries without a node, held by the sequences that will read them next. It is a
subclass of `SideCache` that finds entries by digest, and a `SideRule` that admits, covers and releases them.

Axes: n slots, B numbers of a sequence's states over all layers; N rows, V pages that a row may have, W places of a page
table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.records import IntArray, PageRun, Row
from rekindle._src.kvcache.persist.segment import LeafSpec
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.kvcache.side import EntryWords, Keying, SidePlan
from rekindle._src.models.base import Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs import page_memory
from rekindle._src.programs.buckets import FEW, SMALLEST_ROWS, Helper
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.kv_layout import KV, Layer, Payload
from rekindle._src.programs.partitioning import HEADS, PAYLOAD, DeviceLayout, Partitioning
from rekindle._src.programs.row_option import Columns, RowOption, TokenPlaces
from rekindle_kernels import EDGE


class PlanRoom(TypedDict):
    """The fields of a plan that follow from the room for its entries."""

    page_size: int
    slots: int
    slot_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan(SidePlan, ABC):
    """A plan with the device's part of its kind. `name` is the field of `kv_layout.Layer` that has its arrays."""

    moved: ClassVar[int]  # entries of one transfer
    divided: ClassVar[DeviceLayout]  # entries in transfers, on a mesh
    pinned: ClassVar[bool] = True  # they pass pinned memory where there is some

    @classmethod
    @abstractmethod
    def slots_for(cls, model: ModelConfig, config: ResolvedConfig, placement: Placement, pages: int) -> int:
        """Return how many slots there are next to so many pages, the scratch one included; 0 for other models."""

    @classmethod
    @abstractmethod
    def slot_size(cls, local: ModelConfig, config: ResolvedConfig) -> int:
        """Return the bytes of one slot on a device that has the `local` part of the model."""

    @classmethod
    @abstractmethod
    def planned(cls, room: PlanRoom, model: ModelConfig, config: ResolvedConfig) -> Self:
        """Return the plan with so much room, for a model that has such entries."""

    @classmethod
    def of(cls, model: ModelConfig, config: ResolvedConfig, placement: Placement) -> Self | None:
        """Return the plan for a resolved config; None for a model without such entries."""
        slots = cls.slots_for(model, config, placement, config.device_pages)
        if not slots:
            return None
        room = PlanRoom(
            page_size=config.page_size,
            slots=slots,
            slot_bytes=cls.slot_size(placement.local_config(model), config),
            host_bytes=config.host_memory // cls.share if config.prefix_cache else 0,
        )
        return cls.planned(room, model, config)

    @property
    def read_out(self) -> Helper:
        """The program that reads entries out."""
        return Helper(f"{self.name}_out", self.moved)

    @property
    def fill(self) -> Helper:
        """The program that fills slots."""
        return Helper(f"{self.name}_in", self.moved)

    @abstractmethod
    def feature(self, number: int) -> Feature:
        """Return the feature that sends this side cache's columns; `number` is its index among a row's side caches."""

    @abstractmethod
    def gather(self, kv: KV, ids: Array) -> Payload:
        """Return the entries in the slots `ids` [n], each array [n, …]."""

    @abstractmethod
    def scatter(self, kv: KV, ids: Array, entries: Sequence[Payload]) -> KV:
        """Write entries of `gather`, one for each slot, to the slots `ids`; ids that pad the transfer are 0."""

    @abstractmethod
    def read_in_place(self, kv: KV, ids: Sequence[int]) -> Payload:
        """Return the entries in the slots `ids` as `gather` does, on one CPU device and without a program."""

    @abstractmethod
    def fill_in_place(self, kv: KV, ids: Sequence[int], entries: Sequence[Payload]) -> None:
        """Write entries to slots as `scatter` does, on one CPU device and without a program."""

    @abstractmethod
    def to_host(self, parts: Partitioning, payload: Payload) -> list[np.ndarray[Any, Any]]:
        """Wait for the result of `gather` on a mesh or a device, and return it as a single device has it."""

    @abstractmethod
    def to_device(self, parts: Partitioning, entry: Payload) -> Payload:
        """Return an entry off the devices in the form that `scatter` takes."""


def side_caches(model: ModelConfig, config: ResolvedConfig, placement: Placement) -> tuple[DevicePlan, ...]:
    """Return the plans of a session's side caches: pure values. `config` is resolved, for one data shard."""
    plans = (kind.of(model, config, placement) for kind in KINDS)
    return tuple(plan for plan in plans if plan is not None)


def slots_of(plans: Sequence[SidePlan]) -> dict[str, int]:
    """Return the slots of each side cache by its name, as `kv_layout.abstract` takes them."""
    return {plan.name: plan.slots for plan in plans}


LEAST = 8  # slots of the tree
SPARE = 16  # slots for states after drafts, at most


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentStates(DevicePlan):
    """The states of models with recurrent layers. An entry is one array over all layers, float32 [1, B]."""

    name, keying = "states", Keying.BOUNDARY
    words = EntryWords("state", "states", "the state after them", "no state after them", "a state after them")
    moved, divided, pinned = 1, HEADS, False

    @classmethod
    def slots_for(cls, model: ModelConfig, config: ResolvedConfig, placement: Placement, pages: int) -> int:
        """Each running request has one, and the tree a prompt's and a text's for each, if prompts are shared. There are
        some for drafts if the config asks for drafts."""
        if not model.is_recurrent:
            return 0
        tree = max(LEAST, 2 * config.max_requests) if config.prefix_cache else 0
        return 1 + config.max_requests + _spare(config) + tree

    @classmethod
    def slot_size(cls, local: ModelConfig, config: ResolvedConfig) -> int:
        return paged.state_bytes(local)

    @classmethod
    def planned(cls, room: PlanRoom, model: ModelConfig, config: ResolvedConfig) -> Self:
        numbers = paged.state_bytes(model) // 4
        return cls(
            **room,
            first=1 + config.max_requests + _spare(config),
            spare=_spare(config),
            step=math.lcm(EDGE, room["page_size"]),
            edge=EDGE,
            leaves=(LeafSpec((numbers,), "float32"),),
            content=f"{numbers} numbers",
        )

    def feature(self, number: int) -> Feature:
        return Feature(StateSlots(number))

    def gather(self, kv: KV, ids: Array) -> Payload:
        return (jnp.concatenate([array[ids].reshape(ids.shape[0], -1) for array in _states(kv)], axis=1),)

    def scatter(self, kv: KV, ids: Array, entries: Sequence[Payload]) -> KV:
        ((states,),) = entries  # [1, B]
        first = 0
        layers: list[Layer] = []
        for layer in kv:
            arrays = []
            for array in layer.states:
                size = math.prod(array.shape[1:])
                part = states[:, first : first + size].reshape(-1, *array.shape[1:])
                arrays.append(array.at[ids].set(part))
                first += size
            layers.append(layer._replace(states=tuple(arrays)))
        return tuple(layers)

    def read_in_place(self, kv: KV, ids: Sequence[int]) -> Payload:
        return page_memory.read_states(kv, ids)

    def fill_in_place(self, kv: KV, ids: Sequence[int], entries: Sequence[Payload]) -> None:
        page_memory.fill_states(kv, ids, entries)

    def to_host(self, parts: Partitioning, payload: Payload) -> list[np.ndarray[Any, Any]]:
        (states,) = payload
        return [parts.states_to_host(states)]

    def to_device(self, parts: Partitioning, entry: Payload) -> Payload:
        (states,) = entry
        return (parts.states_to_device(states),)


def _states(kv: KV) -> Iterator[jax.Array]:
    for layer in kv:
        yield from layer.states


def _spare(config: ResolvedConfig) -> int:
    """Return how many slots there are for states after drafts: one for each row of a step, up to SPARE."""
    return min(SPARE, max(config.max_requests, SMALLEST_ROWS)) if config.asks_for_drafts else 0


class StateSlots(RowOption[tuple[Array, Array]]):
    """The slots that a step reads and writes, two integers in each row, where an entry stands for all tokens before.

    A row may read its sequence's entry from one slot and write it to another. So an entry that the prefix tree keeps is
    used without copying it, and left for the tree without copying it. Slot 0 is scratch: empty rows use it.

    Where rows may be drafts, layers get a third array: the places of rows in chains: each row reads what the one
    before it writes.
    """

    side, row_ints = "states", 2

    def __init__(self, number: int) -> None:
        self._number = number

    def write_row(self, row: Row, out: IntArray) -> None:
        out[:] = row.sides[self._number]

    def unpack(self, columns: Columns) -> tuple[Array, Array]:
        return columns.row_ints[:, 0], columns.row_ints[:, 1]

    def for_layers(self, own: tuple[Array, Array], places: TokenPlaces) -> tuple[Array, ...]:
        return (*own, _chain_places(*own)) if places.drafts else own


def _chain_places(reads: Array, writes: Array) -> Array:
    """Return the place of each row in its chain [N], 0 of rows that read what no row writes."""
    rows = lax.iota(jnp.int32, len(reads))
    follows = (rows > 0) & (reads > 0) & (reads == jnp.roll(writes, 1))
    return rows - lax.cummax(jnp.where(follows, 0, rows))


STEPS = 4  # of tokens that are not committed: in flight and planned, and pages of as many that wait to be released


@functools.lru_cache(maxsize=8)  # it looks at all layers
def _window(model: ModelConfig) -> int:
    return model.window


def span(model: ModelConfig, page_size: int) -> int:
    """Return how many pages before a page's end a sequence needs that continues there."""
    return pages_for(_window(model), page_size)


def least_pages(model: ModelConfig, config: ResolvedConfig) -> int:
    """Return with how many pages no step ever lacks one, however its requests lie; the scratch page is one of them."""
    steps = pages_for(STEPS * config.max_tokens_per_step, config.page_size)
    return 1 + config.max_requests * (span(model, config.page_size) + 2) + steps


@functools.lru_cache(maxsize=8)  # an opening asks several times; it takes a millisecond for 18 layers
def _window_page(model: ModelConfig, page_size: int, dtype: str) -> tuple[LeafSpec, ...]:
    """Return the arrays of one page over all layers with a window."""
    page = paged.payload_layout(paged.abstract(model, 1, page_size, dtype, {"windows": 1}), windows=True)
    return tuple(LeafSpec(tuple(shape[1:]), str(leaf_dtype)) for shape, leaf_dtype in page)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WindowPages(DevicePlan):
    """The pages of layers with a window: pages are given back once the window has passed them."""

    name, keying = "windows", Keying.PAGES
    words = EntryWords(
        "window", "windows", "the window before their end", "no window before them", "the window before their end"
    )
    moved, divided = FEW, PAYLOAD

    most: int = 0  # pages that a row sends

    @classmethod
    def slots_for(cls, model: ModelConfig, config: ResolvedConfig, placement: Placement, pages: int) -> int:
        """They get what as many sequences of half of `max_model_len` need, so that ends of turns stay there too. They
        never need more than the others have, since a sequence has a page here only where it has one there."""
        if not placement.pages_apart or not _window(model):
            return 0
        half = max(1, pages_for(config.max_model_len, 2 * config.page_size))
        share = -(-pages * (span(model, config.page_size) + 2) // half)
        return min(pages, max(least_pages(model, config), share))

    @classmethod
    def slot_size(cls, local: ModelConfig, config: ResolvedConfig) -> int:
        return sum(leaf.nbytes for leaf in _window_page(local, config.page_size, config.kv_dtype))

    @classmethod
    def planned(cls, room: PlanRoom, model: ModelConfig, config: ResolvedConfig) -> Self:
        size = room["page_size"]
        most = span(model, size) + pages_for(config.max_tokens_per_step, size) + 2
        return cls(
            **room,
            first=1,
            step=size,
            span=span(model, size),
            window=_window(model),
            reserved=0 if room["slots"] == config.device_pages else least_pages(model, config) - 1,
            leaves=_window_page(model, size, config.kv_dtype),
            content=f"{_window(model)} tokens",
            most=min(most, pages_for(config.max_model_len, size)),
        )

    def feature(self, number: int) -> Feature:
        return Feature(PageTables(number, self.most))

    def gather(self, kv: KV, ids: Array) -> Payload:
        return paged.gather(kv, ids, windows=True)

    def scatter(self, kv: KV, ids: Array, entries: Sequence[Payload]) -> KV:
        return paged.scatter(kv, ids, entries, windows=True)

    def read_in_place(self, kv: KV, ids: Sequence[int]) -> Payload:
        return page_memory.read_pages(kv, ids, windows=True)

    def fill_in_place(self, kv: KV, ids: Sequence[int], entries: Sequence[Payload]) -> None:
        page_memory.fill_pages(kv, ids, entries, windows=True)

    def to_host(self, parts: Partitioning, payload: Payload) -> list[np.ndarray[Any, Any]]:
        return parts.to_host(payload, windows=True)

    def to_device(self, parts: Partitioning, entry: Payload) -> Payload:
        return parts.to_device(entry, windows=True)


KINDS: tuple[type[DevicePlan], ...] = (RecurrentStates, WindowPages)


class RowPages(NamedTuple):
    """The pages of each row, and the place of the first."""

    first: Array  # [N]
    pages: Array  # [N, V]

    def spread(self, width: int) -> Array:
        """Return the pages at their places [N, width], the scratch page elsewhere."""
        most = self.pages.shape[1]
        places = lax.iota(jnp.int32, width)[None] - self.first[:, None]
        taken = jnp.take_along_axis(self.pages, jnp.clip(places, 0, most - 1), axis=1)
        return jnp.where((places >= 0) & (places < most), taken, 0)


class PageTables(RowOption[RowPages]):
    """The pages of each row, and for layers the page of each token, and a table of all places."""

    side = "windows"

    def __init__(self, number: int, most: int) -> None:
        self._number, self.row_ints = number, 1 + most

    def write_row(self, row: Row, out: IntArray) -> None:
        run = row.sides[self._number]
        assert isinstance(run, PageRun), "the row has no pages of layers that give some back"
        out[0] = run.first
        out[1 : 1 + len(run.pages)] = run.pages

    def unpack(self, columns: Columns) -> RowPages:
        return RowPages(columns.row_ints[:, 0], columns.row_ints[:, 1:])

    def for_layers(self, own: RowPages, places: TokenPlaces) -> tuple[Array, Array]:
        table = own.spread(places.width)
        return jnp.where(places.valid, table[places.owners, places.pages], 0), table
