"""From a step's packed output on the host to `RowResult`s."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.config import MAX_LOGPROBS
from rekindle._src.core.records import Row, RowResult, StepPlan, TokenLogprobs
from rekindle._src.programs.finite import NOT_FINITE

Packed = NDArray[np.int32]


def needs_prompt(plan: StepPlan) -> bool:
    """Whether the packed prompt log-probabilities are worth a transfer."""
    return any(row.request.sampling.prompt_logprobs is not None for row in plan.prefill)


def unpack_logprobs(packed: Packed, token: int, count: int) -> TokenLogprobs:
    """One line of `logprobs.WIDTH` integers."""
    floats = packed.view(np.float32)
    return TokenLogprobs(
        token,
        float(floats[0]),
        tuple(packed[1 : 1 + count].tolist()),
        tuple(floats[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + count].tolist()),
    )


def row_results(plan: StepPlan, rows: Packed, prompt: Packed | None, decode_rows: int) -> tuple[RowResult, ...]:
    """Results in the order of `plan.rows`; row R + s of the output is the s-th prefill's."""
    tokens = rows[:, 0].tolist()
    results = [_result(row, rows[index], tokens[index], ()) for index, row in enumerate(plan.decode)]
    at = 0
    for index, row in enumerate(plan.prefill, start=decode_rows):
        prompts = _prompt_logprobs(row, prompt[at : at + row.length]) if prompt is not None else ()
        results.append(_result(row, rows[index], tokens[index], prompts))
        at += row.length
    return tuple(results)


def _result(row: Row, packed: Packed, token: int, prompts: tuple[TokenLogprobs, ...]) -> RowResult:
    request = row.request
    if not row.samples:
        return RowResult(request.id, row.epoch, None, None, prompts)
    if token == NOT_FINITE:
        return RowResult(request.id, row.epoch, None, None, prompts, finite=False)
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
