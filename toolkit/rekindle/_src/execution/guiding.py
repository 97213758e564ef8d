"""Guided rows on the host: fills a step's masks from its requests' guides, and advances the guides by its tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np

from rekindle._src.core.guides import Guided, GuideLike, Mask
from rekindle._src.core.records import Row, RowResult, StepPlan
from rekindle._src.programs.data_shards import ALONE, DataShards
from rekindle._src.programs.packing import Layout
from rekindle.errors import NoTokenLeft, RekindleError

SLOWEST_TOKEN = 0.2  # seconds of a processor that a guide may take for a token; ordinary ones take a thousandth


def needs_unread_token(plan: StepPlan) -> bool:
    """True if a mask of the plan needs a token that has not been read yet."""
    return any(guide.consumed < row.generated for _, row, guide in _guided(plan, 0) if not row.draft)


def fill_masks(plan: StepPlan, layout: Layout, masks: Mask, shards: DataShards = ALONE) -> dict[str, Exception]:
    """Write the masks [N, W] of a step's rows, N for each data shard.

    Returns the errors of requests whose guides can't continue.

    Rows of requests that ended meanwhile get any mask: their results are dropped. A draft's mask is that behind the
    draft; where the drafts leave the grammar, no row behind can be accepted.
    """
    masks.fill(-1)
    errors: dict[str, Exception] = {}
    for shard, part in enumerate(shards.split(plan)):
        _fill(part, layout, shards.part(shard, masks), errors)
    return errors


def _fill(plan: StepPlan, layout: Layout, masks: Mask, errors: dict[str, Exception]) -> None:
    ahead: GuideLike | None = None
    before = time.thread_time()  # read once a row: it takes as long as a quick mask
    for index, row, guide in _guided(plan, layout.rows):
        if not row.draft:
            ahead = guide if guide.consumed == row.generated and not guide.ended else None
        elif ahead is not None:
            assert row.token_ids is not None, "a draft has its token"
            ahead = ahead.copy()
            report = ahead.consume(int(row.token_ids[0]))
            if report.ended or report.problem:
                ahead = None
        problem = "" if ahead is None else ahead.fill(masks[index])
        now = time.thread_time()
        guide.spent += now - before
        before = now
        if problem and not row.draft:
            errors[row.request.id] = _guide_error(row, problem)
        if problem:
            masks[index].fill(-1)
            ahead = None


def advance_guides(
    plan: StepPlan, results: tuple[RowResult, ...], errors: dict[str, Exception]
) -> tuple[RowResult, ...]:
    """Return the results of a step with each guide's report on its token. `errors` are those of `fill_masks`."""
    if not plan.guided:
        return results
    updated: list[RowResult] = []
    follows = False  # True while all rows of the request so far were right
    before = time.thread_time()
    for row, result in zip(plan.rows, results, strict=True):
        guide = row.request.guide
        if guide is None or not row.samples:
            updated.append(result)
            continue
        if row.draft:
            assert row.token_ids is not None, "a draft has its token"
            follows = follows and updated[-1].token_id == row.token_ids[0]
        else:
            follows = guide.consumed == row.generated
        if follows and row.request.id in errors:
            result = dataclasses.replace(result, token_id=None, error=errors[row.request.id])
        if follows and result.token_id is not None and not guide.ended:
            report = guide.consume(result.token_id)
            now = time.thread_time()
            report = _with_time(report, guide.spent + now - before)
            guide.spent, before = 0.0, now
            result = result.following(report, _guide_error(row, report.problem) if report.problem else result.error)
        else:
            follows = False
        updated.append(result)
    return tuple(updated)


def _with_time(report: Guided, seconds: float) -> Guided:
    """Add the time to a guide's report; a guide that is too slow gets a problem, so that it can't continue."""
    if seconds > SLOWEST_TOKEN and not report.problem and not report.ended:
        problem = f"following one token took {seconds:.2f} s, and {SLOWEST_TOKEN:g} s are possible: it is ambiguous"
        report = report._replace(problem=problem)
    return Guided._make((*report[:-1], seconds))  # a third of the time of `_replace`


def dead_end(row: Row) -> RekindleError:
    """Return the error of a row for which the grammar and the request's other options leave no token."""
    sampling, causes = row.request.sampling, []
    if row.generated < sampling.min_tokens:
        causes.append(f"min_tokens={sampling.min_tokens}")
    if sampling.logit_bias:
        causes.append("logit_bias")
    if sampling.processors:
        causes.append(f"processors={list(sampling.processors)}")
    options = " and ".join(causes) or "the other options"
    return NoTokenLeft(
        f"After {row.generated} tokens of request {row.request.id}, none is left that both its {_limits(row)} and "
        f"{options} allow. Change one of them."
    )


def _limits(row: Row) -> str:
    """Name the options that the row's guide follows, for messages."""
    sampling = row.request.sampling
    restrictions = {"allowed_token_ids": sampling.allowed_token_ids, "bad_words": sampling.bad_words}
    return " with ".join((["grammar"] if sampling.structured or not sampling.restricted else [])
                         + [name for name, value in restrictions.items() if value])  # fmt: skip


def new_masks(layout: Layout, words: int, shards: DataShards = ALONE) -> Mask:
    return np.full((shards.count * layout.sequences, words), -1, np.int32)


def _guide_error(row: Row, problem: str) -> RekindleError:
    return NoTokenLeft(
        f"The {_limits(row)} of request {row.request.id} can't go on after {row.generated} tokens: {problem}. "
        + ("Change one of them." if row.request.sampling.restricted else "Simplify it.")
    )


def _guided(plan: StepPlan, decode_rows: int) -> Iterator[tuple[int, Row, GuideLike]]:
    """Yield the rows that choose among allowed tokens, with their places in the program."""
    for index, row in enumerate(plan.decode):
        if row.request.guide is not None and row.samples:
            yield index, row, row.request.guide
    for index, row in enumerate(plan.prefill, start=decode_rows):
        if row.request.guide is not None and row.samples:
            yield index, row, row.request.guide
