"""StepPacking for several data shards: their plans in the buffers of one step, and the results of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from rekindle._src.core.records import PageMove, Row, StepPlan
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.programs.buckets import Bucket, ProgramVariant
from rekindle._src.programs.features import Features
from rekindle._src.programs.packing import (
    AnyUpload,
    Constants,
    Layout,
    Outputs,
    PageBatch,
    ReadRows,
    SentTables,
    StepPacking,
    StepSize,
    Upload,
)
from rekindle._src.programs.partitioning import POOLED
from rekindle._src.programs.request_state import NOWHERE

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DataShards(StepPacking):
    """The packing for `count` data shards, each with `slots` and `pages`."""

    count: int

    @property
    def all_slots(self) -> int:
        return self.count * self.slots

    @property
    def first_pages(self) -> tuple[int, ...]:
        return tuple(range(0, self.count * self.pages, self.pages))

    def features(self, make: Callable[[], Features]) -> Features:
        return DataFeatures(self, [make() for _ in range(self.count)])

    def upload(self, layout: Layout, sent: SentTables | None) -> AnyUpload:
        assert sent is None, "each step brings its page tables"
        return DataUpload(layout, self)

    def size(self, plan: StepPlan) -> StepSize:
        """Return a size for the plan of every shard: all run the same program."""
        return StepSize(*map(max, zip(*map(super().size, self.split(plan)), strict=True)))

    def tokens(self, bucket: Bucket) -> int:
        return self.count * bucket.cost

    def admission(self, ints: np.ndarray, floats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the operands of all shards: the slot's shard admits, the others write scratch."""
        all_ints = np.full((self.count, len(ints)), NOWHERE, np.int32)
        all_floats = np.zeros((self.count, len(floats)), np.float32)
        all_ints[:, 0], all_ints[:, 1] = self.slots, 0
        shard, slot = divmod(int(ints[0]), self.slots)
        all_ints[shard], all_floats[shard] = ints, floats
        all_ints[shard, 0] = slot
        return all_ints.reshape(-1), all_floats.reshape(-1)

    def parts(self, plan: StepPlan, array: np.ndarray) -> Iterable[tuple[StepPlan, np.ndarray]]:
        return [(own, self.part(shard, array)) for shard, own in enumerate(self.split(plan))]

    def results(self, plan: StepPlan, rows: np.ndarray, outputs: Outputs, read: ReadRows[T]) -> tuple[T, ...]:
        results = []
        for shard, (part, own) in enumerate(self.parts(plan, rows)):
            parts = [(feature, self._part_of(feature, each, shard)) for feature, each in outputs]
            results.append(read(part, own, parts))
        return self.join(plan, results)

    def _part_of(self, feature: Any, output: Any, shard: int) -> Any:
        """Return a shard's part of an output: of an array, or of each array of a mapping."""
        axis = 1 if feature.part.output_layout is POOLED else 0
        if isinstance(output, dict):
            return {key: self.part(shard, array, axis=axis) for key, array in output.items()}
        return None if output is None else self.part(shard, output, axis=axis)

    def batches(self, moves: Sequence[PageMove], sizes: Sequence[int]) -> Iterator[PageBatch]:
        """Yield the moves in batches: per shard as many pages as the largest size that they fill, or the smallest."""
        waiting: list[list[PageMove]] = [[] for _ in range(self.count)]
        for move in moves:
            waiting[move.page // self.pages].append(move)
        begin, end = 0, max(map(len, waiting))
        while begin < end:
            most = next((size for size in sizes if size <= end - begin), sizes[-1])
            batch: list[PageMove] = []
            places: list[int] = []
            ids = np.zeros(self.count * most, np.int32)
            for shard, queue in enumerate(waiting):
                for place, move in enumerate(queue[begin : begin + most], start=shard * most):
                    batch.append(move)
                    places.append(place)
                    ids[place] = self.page_id(move.page)
            yield PageBatch(tuple(batch), tuple(places), ids)
            begin += most

    def pages_of(self, ids: np.ndarray) -> int:
        return len(ids) // self.count

    def page_id(self, page: int) -> int:
        return page % self.pages

    def in_call(self, pages: Mapping[int, T], places: int, join: Callable[[list[T]], T]) -> list[T]:
        """Return the first pages of all shards, joined, then the second ones, and so on."""
        padding = next(iter(pages.values()))  # goes to page 0
        each = places // self.count
        used = 1 + max(place % each for place in pages)
        return [join([pages.get(first + place, padding) for first in range(0, places, each)]) for place in range(used)]

    # -- shards

    def shard_of(self, row: Row) -> int:
        """Return the shard that computes a row."""
        return row.slot // self.slots

    def split(self, plan: StepPlan) -> tuple[StepPlan, ...]:
        """Return the rows of each shard, in their order."""
        return tuple(
            StepPlan(plan.step, tuple(decode), tuple(prefill))
            for decode, prefill in zip(self._by_shard(plan.decode), self._by_shard(plan.prefill), strict=True)
        )

    def join(self, plan: StepPlan, parts: Sequence[Sequence[T]]) -> tuple[T, ...]:
        """Join values for each row of the plans of `split`, in the order of the whole plan's rows."""
        decode = [0] * self.count
        for row in plan.decode:
            decode[self.shard_of(row)] += 1
        first = [iter(part[:count]) for part, count in zip(parts, decode, strict=True)]
        rest = [iter(part[count:]) for part, count in zip(parts, decode, strict=True)]
        return (
            *(next(first[self.shard_of(row)]) for row in plan.decode),
            *(next(rest[self.shard_of(row)]) for row in plan.prefill),
        )

    def part(self, shard: int, array: np.ndarray, axis: int = 0) -> np.ndarray:
        """Return a view of the part of a shard."""
        size = array.shape[axis] // self.count
        return array[(slice(None),) * axis + (slice(shard * size, (shard + 1) * size),)]

    def _by_shard(self, rows: Sequence[Row]) -> list[list[Row]]:
        by_shard: list[list[Row]] = [[] for _ in range(self.count)]
        for row in rows:
            by_shard[self.shard_of(row)].append(row)
        return by_shard


class DataUpload:
    """`Upload` for several data shards, one after the other. A shard without rows computes an empty step."""

    def __init__(self, layout: Layout, shards: DataShards) -> None:
        self.layout, self._shards = layout, shards  # the layout of each shard
        self.any_flags = 0  # the union of the rows' flags
        self.ints = np.zeros(shards.count * layout.ints, np.int32)
        self.floats = np.zeros(shards.count * layout.floats, np.float32)
        self._parts = [
            Upload(
                layout,
                (shards.part(shard, self.ints), shards.part(shard, self.floats)),
                first_slot=shard * shards.slots,
                first_page=shard * shards.pages,
            )
            for shard in range(shards.count)
        ]

    @property
    def sequences(self) -> int:
        return self._shards.count * self.layout.sequences

    def pack(self, plan: StepPlan, constants: Constants) -> None:
        """Write a plan into the buffers."""
        self.any_flags = 0
        for part, rows in zip(self._parts, self._shards.split(plan), strict=True):
            part.pack(rows, constants)
            self.any_flags |= part.any_flags
        for part in self._parts:
            part.any_flags = self.any_flags  # the same in all shards, so that all take the same branches


class DataFeatures(Features):
    """The features of steps in several data shards. Each shard prepares operands of its own, which are then joined."""

    def __init__(self, shards: DataShards, each: Sequence[Features]) -> None:
        super().__init__(each[0].entries, each[0].late)
        self._shards, self._each = shards, tuple(each)
        self._joined: dict[tuple[Any, int], tuple[tuple[Any, ...], np.ndarray]] = {}  # of the last step

    def prepare(self, plan: StepPlan, variants: ProgramVariant, rows: int) -> None:
        for own, part in zip(self._each, self._shards.split(plan), strict=True):
            own.prepare(part, variants, rows)

    def operands(self, variants: ProgramVariant) -> tuple[object, ...]:
        each = [own.operands(variants) for own in self._each]
        return tuple(
            self._join(feature, [own[index] for own in each]) if feature in self.prepared else each[0][index]
            for index, feature in enumerate(self.compiled(variants))
        )

    def free(self) -> None:
        self._joined.clear()
        for own in self._each:
            own.free()

    def _join(self, feature: object, operands: Sequence[object]) -> object:
        leaves, trees = zip(*map(jax.tree.flatten, operands), strict=True)
        joined = [self._leaf((feature, index), parts) for index, parts in enumerate(zip(*leaves, strict=True))]
        return trees[0].unflatten(joined)

    def _leaf(self, key: tuple[object, int], parts: tuple[Any, ...]) -> np.ndarray:
        """Join an array of all shards, into new memory: steps in flight read the last one.

        That one is used again if no shard has replaced its part.
        """
        known = self._joined.get(key)
        if known is None or any(one is not other for one, other in zip(known[0], parts, strict=True)):
            first = parts[0]
            whole = aligned((len(parts) * first.shape[0], *first.shape[1:]), first.dtype)
            known = self._joined[key] = parts, np.concatenate(parts, out=whole)
        return known[1]
