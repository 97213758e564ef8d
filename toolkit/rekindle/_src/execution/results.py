"""Unpacking of a step's output on the host into `RowResult`s, and steps that ran without some of their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.records import Row, RowResult, StepPlan, TokenLogprobs
from rekindle._src.core.sampling import MAX_LOGPROBS
from rekindle._src.execution.guiding import dead_end
from rekindle._src.programs.data_shards import ALONE, DataShards
from rekindle._src.programs.data_upload import AnyUpload
from rekindle._src.programs.finite import NOT_FINITE
from rekindle._src.programs.packing import Constants
from rekindle._src.programs.token_masks import NO_TOKEN

Packed = NDArray[np.int32]


def needs_prompt(plan: StepPlan) -> bool:
    """True if the packed prompt log-probabilities have to be transferred."""
    return any(row.request.sampling.prompt_logprobs is not None for row in plan.prefill)


def needs_pooled(plan: StepPlan) -> bool:
    """True if the plan needs a program that pools hidden states."""
    return any(row.request.pooling is not None for row in plan.prefill)


def unpack_logprobs(packed: Packed, token: int, count: int) -> TokenLogprobs:
    """Return the log-probabilities in one line of `logprobs.WIDTH` integers."""
    floats = packed.view(np.float32)
    return TokenLogprobs(
        token,
        float(floats[0]),
        tuple(packed[1 : 1 + count].tolist()),
        tuple(floats[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + count].tolist()),
    )


def _row_results(
    plan: StepPlan, rows: Packed, prompt: Packed | None, decode_rows: int, pooled: NDArray[np.float32] | None
) -> tuple[RowResult, ...]:
    """Return the results of one data shard; row R + s of the output belongs to the s-th prefill.

    `pooled` [2, S, E] are the sums and the last states of the prefills.
    """
    tokens = rows[:, 0].tolist()
    results = [_result(row, rows[index], tokens[index], ()) for index, row in enumerate(plan.decode)]
    at = 0
    for index, row in enumerate(plan.prefill, start=decode_rows):
        if row.request.pooling is not None:
            assert pooled is not None, "a program that does not pool ran a request with pooling"
            vector = pooled[int(row.request.pooling == "last"), index - decode_rows].copy()
            finite = bool(np.isfinite(vector).all())
            results.append(RowResult(row.request.id, row.epoch, None, finite=finite, pooled=vector))
            at += row.length
            continue
        prompts = _prompt_logprobs(row, prompt[at : at + row.length]) if prompt is not None else ()
        results.append(_result(row, rows[index], tokens[index], prompts))
        at += row.length
    return tuple(results)


def row_results(
    plan: StepPlan,
    rows: Packed,
    prompt: Packed | None,
    decode_rows: int,
    pooled: NDArray[np.float32] | None = None,
    shards: DataShards = ALONE,
) -> tuple[RowResult, ...]:
    """Return the results in the order of `plan.rows`. A data shard's part of each array holds the rows it computed."""
    results = []
    for shard, part in enumerate(shards.split(plan)):
        prompts = None if prompt is None else shards.part(shard, prompt)
        vectors = None if pooled is None else shards.part(shard, pooled, axis=1)
        results.append(_row_results(part, shards.part(shard, rows), prompts, decode_rows, vectors))
    return shards.join(plan, results)


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


def _result(row: Row, packed: Packed, token: int, prompts: tuple[TokenLogprobs, ...]) -> RowResult:
    request = row.request
    if not row.samples:
        return RowResult(request.id, row.epoch, None, None, prompts)
    if token == NOT_FINITE:
        return RowResult(request.id, row.epoch, None, None, prompts, finite=False)
    if token == NO_TOKEN:
        return RowResult(request.id, row.epoch, None, None, prompts, error=dead_end(row))
    count = request.sampling.logprobs
    logprobs = None if count is None else unpack_logprobs(packed[1:], token, count)
    return RowResult(request.id, row.epoch, token, logprobs, prompts)


def _prompt_logprobs(row: Row, packed: Packed) -> tuple[TokenLogprobs, ...]:
    count = row.request.sampling.prompt_logprobs
    if count is None:
        return ()
    following = row.request.token_ids[row.start + 1 : row.start + row.length + 1].tolist()
    return tuple(
        unpack_logprobs(line, token, count) for line, token in zip(packed[: len(following)], following, strict=True)
    )
