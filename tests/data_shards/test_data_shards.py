"""Data shards: numbers on the host and on the devices, and the buffers of a step for all shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from helpers import small
from helpers.driving import tiny_config
from helpers.fakes import extended
from rekindle._src.capabilities.captures.step import Steering, SteeringOption
from rekindle._src.capabilities.captures.tapped import Edit, RequestTaps
from rekindle._src.capabilities.pooling.step import Pooling
from rekindle._src.core.records import PageMove, Request, Row, StepPlan
from rekindle._src.core.sampling import Sampling
from rekindle._src.data_shards.packing import DataFeatures, DataShards, DataUpload
from rekindle._src.data_shards.sizes import packing_for
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.features import Features, features_of
from rekindle._src.programs.packing import Constants, Layout, StepPacking, Upload, sections
from rekindle._src.programs.request_state import NOWHERE
from rekindle._src.programs.row_option import RowFlag

SHARDS = DataShards(count=3, slots=4, pages=10)
LAYOUT = Layout(rows=2, prefills=2, tokens=8, width=3, slots=4)


def row(slot: int, start: int, length: int, pages: list[int], **sampling: object) -> Row:
    tokens = np.arange(100 * slot, 100 * slot + start + length, dtype=np.int32)
    request = Request(f"r{slot}", tokens, Sampling(seed=slot + 1, **sampling))  # type: ignore[arg-type]
    return Row(request, 1, slot, start, length, np.array(pages, np.int32), tokens[start:], samples=True)


DECODE = (row(1, 9, 1, [3, 4]), row(9, 4, 1, [21], temperature=0.5), row(8, 2, 1, [22], logprobs=3))
PREFILL = (row(3, 0, 3, [5]), row(4, 0, 5, [11, 12]), row(11, 0, 2, [29], top_p=0.5, temperature=1.0))
PLAN = StepPlan(7, DECODE, PREFILL)


def test_rows_are_split_by_slot_and_joined_in_their_order() -> None:
    parts = SHARDS.split(PLAN)
    assert [[row.slot for row in part.decode] for part in parts] == [[1], [], [9, 8]]
    assert [[row.slot for row in part.prefill] for part in parts] == [[3], [4], [11]]
    assert all(part.step == 7 for part in parts)
    assert SHARDS.join(PLAN, [[row.slot for row in part.rows] for part in parts]) == (1, 9, 8, 3, 4, 11)


def test_one_shard_changes_nothing() -> None:
    alone = StepPacking(slots=4, pages=10)
    ints, floats = np.arange(5, dtype=np.int32), np.zeros(2, np.float32)
    assert alone.admission(ints, floats)[0] is ints
    ((plan, part),) = alone.parts(PLAN, ints)
    assert plan is PLAN and part is ints
    assert alone.results(PLAN, ints, (), lambda plan, rows, outputs: (plan, rows)) == (PLAN, ints)
    assert alone.size(PLAN) == (3, 3, 10) and alone.page_id(25) == 25 and alone.all_slots == 4
    moves = [PageMove(number, bytes([number])) for number in range(1, 7)]
    found = list(alone.batches(moves, (4,)))
    assert [batch.places for batch in found] == [(0, 1, 2, 3), (0, 1)]
    assert [batch.ids.tolist() for batch in found] == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert sum(len(batch.moves) for batch in found) == len(moves)
    assert alone.pages_of(found[1].ids) == 4
    config = tiny_config()
    assert packing_for(1)(config) == StepPacking.of(config)
    assert packing_for(2)(config) == DataShards(config.max_requests, config.device_pages, 2)
    assert not list(alone.batches([], (4,)))


def test_a_step_runs_in_the_program_that_holds_every_shards_plan() -> None:
    assert SHARDS.size(PLAN) == (2, 1, 5)
    assert SHARDS.all_slots == 12 and SHARDS.first_pages == (0, 10, 20)


def test_results_come_from_each_shards_part() -> None:
    rows = np.arange(3 * LAYOUT.sequences).reshape(-1, 1)
    pooled = np.arange(2 * 6).reshape(2, 6)
    output, second = Feature(), Feature(part=Pooling())
    seen = []

    def read(plan: StepPlan, part: Any, outputs: Any) -> tuple[int, ...]:
        seen.append([(feature is second, array.tolist()) for feature, array in outputs])
        return tuple(int(part[0, 0]) for _ in plan.rows)

    found = SHARDS.results(PLAN, rows, [(output, np.arange(6)), (second, pooled)], read)
    assert found == (0, 8, 8, 0, 4, 8)
    assert seen[1] == [(False, [2, 3]), (True, [[2, 3], [8, 9]])]


def test_pages_are_filled_by_place_of_all_shards() -> None:
    pages = {0: "a", 1: "b", 4: "c"}
    assert SHARDS.in_call(pages, 6, "".join) == ["aac", "baa"]
    assert StepPacking(4, 10).in_call(pages, 6, "".join) == ["a", "b", "c"]


def test_pages_move_in_batches_of_all_shards() -> None:
    pages = [1, 2, 3, 25, 13, 21]
    first, second = SHARDS.batches([PageMove(page, bytes([page])) for page in pages], (2,))
    assert first.ids.tolist() == [1, 2, 3, 0, 5, 1]
    assert [(move.page, place) for move, place in zip(first.moves, first.places, strict=True)] == [
        (1, 0), (2, 1), (13, 2), (25, 4), (21, 5),
    ]  # fmt: skip
    assert second.ids.tolist() == [3, 0, 0, 0, 0, 0] and second.places == (0,)
    assert not list(SHARDS.batches([], (2,)))


def test_batches_are_as_large_as_there_are_pages_to_fill_them() -> None:
    moves = [PageMove(page, bytes([page])) for page in (*range(1, 10), 11, 12)]
    found = list(SHARDS.batches(moves, (4, 2)))
    each = [len(batch.ids) // SHARDS.count for batch in found]
    assert sorted(each, reverse=True) == each and set(each) == {4, 2}
    assert sorted(move.page for batch in found for move in batch.moves) == [move.page for move in moves]
    for batch, size in zip(found, each, strict=True):
        for move, place in zip(batch.moves, batch.places, strict=True):
            assert batch.ids[place] == move.page % SHARDS.pages and place // size == move.page // SHARDS.pages


def test_a_slot_is_admitted_in_its_own_shard_and_others_write_scratch() -> None:
    ints, floats = np.array([9, 3, 70, 71], np.int32), np.array([0.5], np.float32)
    all_ints, all_floats = SHARDS.admission(ints, floats)
    nothing = [4, 0, NOWHERE, NOWHERE]
    assert all_ints.reshape(3, -1).tolist() == [nothing, nothing, [1, 3, 70, 71]]
    assert all_floats.tolist() == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("again", [False, True])
def test_each_shard_gets_the_buffers_that_it_would_have_alone(again: bool) -> None:
    constants = Constants(SHARDS.count * SHARDS.slots)
    for each in PLAN.rows:
        constants.put(each)
    upload = DataUpload(LAYOUT, SHARDS)
    if again:  # what an earlier step left must not shine through
        upload.pack(StepPlan(6, tuple(one._replace(slot=one.slot % 4) for one in DECODE[:2]), ()), constants)
    upload.pack(PLAN, constants)
    wanted = int(RowFlag.SAMPLES | RowFlag.CHOOSES | RowFlag.DRAWS | RowFlag.LOGPROBS | RowFlag.TOP_P)
    for shard, part in enumerate(SHARDS.split(PLAN)):
        own = StepPlan(
            7,
            tuple(one._replace(slot=one.slot % 4, pages=one.pages % 10) for one in part.decode),
            tuple(one._replace(slot=one.slot % 4, pages=one.pages % 10) for one in part.prefill),
        )
        alone, here = Upload(LAYOUT), Constants(4)
        for each in own.rows:
            here.put(each)
        alone.pack(own, here)
        expected = sections(LAYOUT, alone.ints)
        found = sections(LAYOUT, SHARDS.part(shard, upload.ints))
        assert (
            int(found.any_flags[0]) & ~wanted == 0 and found.any_flags[0] == sections(LAYOUT, upload.ints).any_flags[0]
        )
        used = [len(part.decode), len(part.prefill)]
        for name in ("varying", "offsets", "tokens", "extra"):
            assert (getattr(found, name) == getattr(expected, name)).all(), (shard, name)
        for index, each in enumerate((*part.decode, *part.prefill)):
            place = index if index < used[0] else LAYOUT.rows + index - used[0]
            assert (found.constant[place] == expected.constant[place]).all()
            assert found.table[place, : len(each.pages)].tolist() == (each.pages % 10).tolist()
        floats = SHARDS.part(shard, upload.floats).reshape(LAYOUT.sequences, -1)
        assert (floats == alone.floats.reshape(LAYOUT.sequences, -1)).all()


def test_each_shard_gets_the_changes_that_it_would_have_alone() -> None:
    """Also in a second step, whose vectors are those of the first in some shards."""
    rng, config, model = np.random.default_rng(0), tiny_config(), small.MODEL.config

    def tapped(each: Row, seed: int) -> Row:
        if each.slot in (3, 9):
            return each
        vectors = rng.standard_normal((1 + each.length, model.hidden_size)).astype(np.float32)
        edits = (
            Edit(seed % 2, (1.0, 2.0, 0.0), vectors[:1], ((0, 99),), False),
            Edit(1, (0.0, 1.0, 0.0), vectors[1:], ((each.start, each.start + each.length),), True),
        )
        request = extended(each.request, RequestTaps(edits=edits, layers=model.num_layers))
        return each._replace(request=request)

    def features() -> Features:
        return features_of((), 0, Feature(SteeringOption(), Steering(model, config)))

    together = SHARDS.features(features)
    assert isinstance(together, DataFeatures)
    first = dataclasses.replace(
        PLAN, decode=tuple(tapped(one, one.slot) for one in DECODE), prefill=tuple(tapped(one, 0) for one in PREFILL)
    )
    second = dataclasses.replace(first, prefill=tuple(tapped(one, 1) for one in PREFILL))
    variant, vectors = ProgramVariant.STEERING, []
    for plan in (first, first, second):
        together.prepare(plan, variant, LAYOUT.rows)
        alone = [features() for _ in range(SHARDS.count)]
        for one, part in zip(alone, SHARDS.split(plan), strict=True):
            one.prepare(part, variant, LAYOUT.rows)
        whole: Any = together.operands(variant)[-1]
        each: Any = [one.operands(variant)[-1] for one in alone]
        for name in whole._fields:
            parts = [getattr(one, name) for one in each]
            np.testing.assert_array_equal(getattr(whole, name), np.concatenate(parts), err_msg=name)
            assert any(part.any() for part in parts), "nothing is changed"
        shapes: Any = together.operand_shapes(variant)[-1]
        for shape, array in zip(shapes, whole, strict=True):
            assert (SHARDS.count * shape.shape[0], *shape.shape[1:]) == array.shape and shape.dtype == array.dtype
        vectors.append(whole.vectors)
    assert vectors[0] is vectors[1] and vectors[1] is not vectors[2], "steps in flight read the others"
    together.free()
