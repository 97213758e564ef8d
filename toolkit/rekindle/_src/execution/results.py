"""Dispatched steps: the runner's record of one, what it packs, and the unpacking of the output into `RowResult`s."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import html
from rekindle._src.core.records import IntArray, LostPage, Row, RowResult, StepPlan
from rekindle._src.execution.device_calls import Forwarded
from rekindle._src.execution.page_transfers import Leaving
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.feature import Feature, Fields, Read
from rekindle._src.programs.packing import ALONE, AnyUpload, Constants, DataShards, Layout
from rekindle._src.programs.sampling import NOT_FINITE
from rekindle._src.programs.step import StepOutput
from rekindle_kernels import MaskGate

Packed = NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class Choice:
    """The second half of a late step that is two programs; it is dispatched once it has its operand."""

    key: Bucket
    program: Any
    forwarded: Forwarded
    operand: IntArray


@dataclasses.dataclass(slots=True)
class InFlight:
    """A dispatched step."""

    plan: StepPlan
    bucket: Bucket | None  # None: the step ran no rows, it only moved pages
    output: StepOutput | None
    upload: AnyUpload | None
    leaving: Leaving
    dispatched: float
    host_seconds: float
    ran_plan: StepPlan  # `plan` without the rows that could not be prepared
    refused: dict[str, Exception]  # by request, why its rows could not be prepared
    choice: Choice | MaskGate | None = None  # of a late step, until it has its operand
    late_errors: dict[str, Exception] = dataclasses.field(default_factory=dict)  # by request: it can't go on
    error: Exception | None = None  # raised while the choice was dispatched
    operand: IntArray | MaskGate | None = None  # the step reads it until it has ended
    results: tuple[RowResult, ...] | None = None  # once they have been read
    lost: tuple[LostPage, ...] = ()
    leaving_states: Any = dataclasses.field(default_factory=list)
    lost_states: tuple[LostPage, ...] = ()
    began: float = 0.0  # when the host began to prepare it
    idle_seconds: float = 0.0  # the device had nothing to do before it
    ended: float | None = None  # estimated, if it ended before its result was read


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RunnerStatistics(html.Record):
    """Counts since the runner was made."""

    steps: int
    tokens: int
    padding: int  # tokens that programs computed beyond those of their steps
    host_seconds: float  # packing and dispatch
    device_seconds: float  # during which a step ran, as far as the host can tell
    traces: int
    compilations: int
    programs: dict[str, int]  # steps by program
    pages_out: int
    pages_in: int
    step_sizes: dict[int, int]  # steps by how many tokens they computed, rounded up to a power of two


def row_results(
    plan: StepPlan,
    layout: Layout,
    rows: Packed,
    outputs: Sequence[tuple[Feature, Any]] = (),
    shards: DataShards = ALONE,
) -> tuple[RowResult, ...]:
    """Return the results in the order of `plan.rows`, with the fields of the features in `outputs`.

    `rows` and each output have a part of each data shard, which holds the rows it computed.
    """
    results = []
    for shard, part in enumerate(shards.split(plan)):
        parts = [(feature, _part(feature, output, shard, shards)) for feature, output in outputs]
        results.append(_row_results(part, layout, shards.part(shard, rows), parts))
    return shards.join(plan, results)


def _part(feature: Feature, output: Any, shard: int, shards: DataShards) -> Any:
    """Return a data shard's part of an output: of an array, or of each array of a mapping."""
    if isinstance(output, dict):
        return {key: shards.part(shard, array, axis=feature.shard_axis) for key, array in output.items()}
    return None if output is None else shards.part(shard, output, axis=feature.shard_axis)


def _row_results(
    plan: StepPlan, layout: Layout, rows: Packed, outputs: Sequence[tuple[Feature, Any]]
) -> tuple[RowResult, ...]:
    """Return the results of one data shard; row R + s of the output belongs to the s-th prefill."""
    tokens, decode = rows[:, 0].tolist(), len(plan.decode)
    chosen = [*tokens[:decode], *tokens[layout.rows : layout.rows + len(plan.prefill)]]
    if not outputs:
        return tuple([_result(row, token, layout, {}) for row, token in zip(plan.rows, chosen, strict=True)])
    fields: Fields = [{} for _ in plan.rows]
    places = [*range(decode), *range(layout.rows, layout.rows + len(plan.prefill))]
    valid = [token if row.samples and token >= 0 else None for row, token in zip(plan.rows, chosen, strict=True)]
    for feature, output in outputs:
        columns = rows[:, 1:][:, layout.features.columns_of(feature, layout.variants)]
        feature.read(Read(plan, valid, places, columns, output), fields)
    entries = zip(plan.rows, chosen, fields, strict=True)
    return tuple([_result(row, token, layout, own) for row, token, own in entries])


def _result(row: Row, token: int, layout: Layout, fields: Mapping[str, Any]) -> RowResult:
    request = row.request
    if not row.samples:
        return RowResult(request.id, row.epoch, None, **fields)
    if token >= 0:
        return RowResult(request.id, row.epoch, token, **fields)
    if token == NOT_FINITE:
        return RowResult(request.id, row.epoch, None, finite=False, **fields)
    return RowResult(request.id, row.epoch, None, error=layout.features.late.no_token(row), **fields)


def drop_rows(plan: StepPlan, refused: Mapping[str, Exception]) -> StepPlan:
    """Return the plan without the rows of the requests in `refused`."""
    if not refused:
        return plan
    return dataclasses.replace(
        plan,
        decode=tuple(row for row in plan.decode if row.request.id not in refused),
        prefill=tuple(row for row in plan.prefill if row.request.id not in refused),
    )


def pack_rows(upload: AnyUpload, plan: StepPlan, constants: Constants, refused: dict[str, Exception]) -> StepPlan:
    """Pack the rows; those that raise are added to `refused`. Returns the plan that was packed."""
    try:
        upload.pack(plan, constants)
    except Exception:
        before = len(refused)
        for decode, prefill in [((row,), ()) for row in plan.decode] + [((), (row,)) for row in plan.prefill]:
            try:
                upload.pack(dataclasses.replace(plan, decode=decode, prefill=prefill), constants)
            except Exception as error:
                refused[(*decode, *prefill)[0].request.id] = error
        if len(refused) == before:
            raise
        plan = drop_rows(plan, refused)
        if plan.rows:
            upload.pack(plan, constants)
    return plan


def with_refused(
    plan: StepPlan, rows: tuple[RowResult, ...], refused: Mapping[str, Exception]
) -> tuple[RowResult, ...]:
    """Return the results of `drop_rows(plan, refused)` in the order of `plan.rows`; refused rows get their errors."""
    if not refused:
        return rows
    computed = iter(rows)
    return tuple(
        RowResult(row.request.id, row.epoch, None, error=refused[row.request.id])
        if row.request.id in refused
        else next(computed)
        for row in plan.rows
    )
