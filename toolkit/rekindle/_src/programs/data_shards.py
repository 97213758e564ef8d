"""Data shards: groups of devices that each have the whole model, and pages and request slots of their own.

On the host, pages and slots are numbered consecutively: those of shard i follow those of shard i - 1. On the devices
each shard counts its own from 0, so its programs are those of a session without the axis. Arrays that a program takes
or returns for every shard have one part after the other along their first axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from rekindle._src.core.records import PageMove, Row, StepPlan
from rekindle._src.programs.request_state import NOWHERE

T = TypeVar("T")


class Batch(NamedTuple):
    """Pages that one call moves."""

    moves: tuple[PageMove, ...]
    places: tuple[int, ...]  # the index of each among the pages of the call
    ids: np.ndarray  # the program's operand: the pages' numbers in their shards, 0 where there is none


@dataclasses.dataclass(frozen=True, slots=True)
class DataShards:
    """The number of data shards, and the sizes of each."""

    count: int
    slots: int  # of requests; the scratch slot follows them
    pages: int  # the scratch page, which is the first one, included

    def of(self, row: Row) -> int:
        """Return the shard that computes a row."""
        return row.slot // self.slots

    def split(self, plan: StepPlan) -> tuple[StepPlan, ...]:
        """Return the rows of each shard, in their order."""
        if self.count == 1:
            return (plan,)
        return tuple(
            StepPlan(plan.step, tuple(decode), tuple(prefill))
            for decode, prefill in zip(self._by_shard(plan.decode), self._by_shard(plan.prefill), strict=True)
        )

    def join(self, plan: StepPlan, parts: Sequence[Sequence[T]]) -> tuple[T, ...]:
        """Join values for each row of the plans of `split`, in the order of the whole plan's rows."""
        if self.count == 1:
            return tuple(parts[0])
        decode = [0] * self.count
        for row in plan.decode:
            decode[self.of(row)] += 1
        first = [iter(part[:count]) for part, count in zip(parts, decode, strict=True)]
        rest = [iter(part[count:]) for part, count in zip(parts, decode, strict=True)]
        return (
            *(next(first[self.of(row)]) for row in plan.decode),
            *(next(rest[self.of(row)]) for row in plan.prefill),
        )

    def batches(self, moves: Sequence[PageMove], sizes: Sequence[int]) -> Iterator[Batch]:
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
                    ids[place] = move.page % self.pages
            yield Batch(tuple(batch), tuple(places), ids)
            begin += most

    def admission(self, ints: np.ndarray, floats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `request_state.admit`'s operands in all shards: the slot's shard admits, the others write scratch."""
        if self.count == 1:
            return ints, floats
        all_ints = np.full((self.count, len(ints)), NOWHERE, np.int32)
        all_floats = np.zeros((self.count, len(floats)), np.float32)
        all_ints[:, 0], all_ints[:, 1] = self.slots, 0
        shard, slot = divmod(int(ints[0]), self.slots)
        all_ints[shard], all_floats[shard] = ints, floats
        all_ints[shard, 0] = slot
        return all_ints.reshape(-1), all_floats.reshape(-1)

    def part(self, shard: int, array: np.ndarray, axis: int = 0) -> np.ndarray:
        """Return a view of the part of a shard."""
        if self.count == 1:
            return array
        size = array.shape[axis] // self.count
        return array[(slice(None),) * axis + (slice(shard * size, (shard + 1) * size),)]

    def _by_shard(self, rows: Sequence[Row]) -> list[list[Row]]:
        by_shard: list[list[Row]] = [[] for _ in range(self.count)]
        for row in rows:
            by_shard[self.of(row)].append(row)
        return by_shard


ALONE = DataShards(1, 1, 1)
