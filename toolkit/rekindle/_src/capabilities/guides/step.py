"""Guides in a step: the host writes the masks of guided rows while the model runs, and then takes their tokens.

Axes: N rows, W words of a mask. A row without a guide has all bits set.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

from rekindle._src.capabilities.guides.guidance import GUIDED, Guidance
from rekindle._src.core.own_failure import own_failure
from rekindle._src.core.records import GuideLike, GuideReport, Mask, Request, Row, RowResult, StepPlan
from rekindle._src.programs.late_masks import LateMasks
from rekindle.errors import NoTokenLeft, RekindleError

QUICK = 0.0001  # seconds that a guide takes at most for a token, unless it is slow: they are not reported
SLOWEST_TOKEN = 0.2  # seconds of a processor that a guide may take for a token; ordinary ones take a thousandth


class Guides(LateMasks):
    """The masks of guided rows."""

    option = Guidance

    def check(self, request: Request) -> None:
        """Take any request: this fills all masks."""

    def in_plan(self, plan: StepPlan) -> bool:
        extended = [row for row in plan.rows if row.request.extensions]
        return any(row.samples and Guidance in row.request.extensions for row in extended)

    def needs_unread_token(self, plan: StepPlan) -> bool:
        """True if a mask of the plan needs a token that has not been read yet."""
        return any(guide.consumed < row.generated for _, row, guide in _guided(plan, 0) if not row.draft)

    def fill(self, plan: StepPlan, rows: int, masks: Mask) -> dict[str, Exception]:
        """Write the masks [N, W] of a plan's rows, where the program has so many decode `rows`.

        Return the errors of requests with guides that can't continue.

        Rows of requests that ended meanwhile get any mask: their results are dropped. A draft's mask is for the token
        after the draft; where the drafts leave the grammar, no later row can be accepted.
        """
        masks.fill(-1)
        errors: dict[str, Exception] = {}
        ahead: GuideLike | None = None
        clock = _Clock()
        for index, row, guide in _guided(plan, rows):
            error: RekindleError | None = None
            try:
                if not row.draft:
                    ahead = guide if guide.consumed == row.generated and not guide.ended else None
                elif ahead is not None:
                    assert row.token_ids is not None, "a draft has its token"
                    ahead = ahead.copy()
                    report = ahead.consume(int(row.token_ids[0]))
                    if report.ended or report.problem:
                        ahead = None
                problem = "" if ahead is None else ahead.fill(masks[index])
            except BaseException as raised:
                problem, error = "it failed", _own_failure(row, raised)
            guide.spent += clock.lap()
            if problem:
                if not row.draft:
                    errors[row.request.id] = error or _guide_error(row, problem)
                masks[index].fill(-1)
                ahead = None
        return errors

    def advance(
        self, plan: StepPlan, results: tuple[RowResult, ...], errors: dict[str, Exception]
    ) -> tuple[RowResult, ...]:
        """Return the results of a step with each guide's report on its token. `errors` were returned by `fill`."""
        updated: list[RowResult] = []
        follows = False  # True while all rows of the request so far were right
        clock = _Clock()
        for row, result in zip(plan.rows, results, strict=True):
            guidance = row.request.extensions.get(Guidance)
            if guidance is None or not row.samples:
                updated.append(result)
                continue
            guide = guidance.guide
            if row.draft:
                assert row.token_ids is not None, "a draft has its token"
                follows = follows and updated[-1].token_id == row.token_ids[0]
            else:
                follows = guide.consumed == row.generated
            if follows and errors and row.request.id in errors:
                result = result._replace(token_id=None, error=errors[row.request.id])
            if follows and result.token_id is not None and not guide.ended:
                try:
                    report = guide.consume(result.token_id)
                except BaseException as raised:
                    updated.append(result._replace(token_id=None, error=_own_failure(row, raised)))
                    follows = False
                    continue
                seconds, guide.spent = guide.spent + clock.lap(), 0.0
                if seconds >= QUICK:
                    report = _with_time(report, seconds)
                result = result.reporting(GUIDED, report)
                if report.problem:
                    result = result._replace(error=_guide_error(row, report.problem))
            else:
                follows = False
            updated.append(result)
        return tuple(updated)

    def no_token(self, row: Row) -> RekindleError:
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


class _Clock:
    """Measures the CPU time of one guide after the other.

    Reading a thread's CPU time takes as long as a quick mask, ten times as long as reading the wall time. So it is read
    only where a guide took longer than most: it may have been slow, or the thread was held up. A full collection of
    Python's garbage takes as long as the process has many objects, and is not the guide's own time: a lap over
    `SLOWEST_TOKEN` with such a collection counts as quick.
    """

    __slots__ = ("_before", "_collections", "_cpu", "_quick")

    def __init__(self) -> None:
        self._cpu, self._before = time.thread_time(), time.perf_counter()
        self._quick = 0.0  # seconds of laps since the CPU time was read
        self._collections = _full_collections()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._before = now - self._before, now
        if seconds < QUICK:
            self._quick += seconds
            return seconds
        cpu = time.thread_time()
        seconds = max(0.0, cpu - self._cpu - self._quick)
        self._cpu, self._quick = cpu, 0.0
        before, self._collections = self._collections, _full_collections()
        return QUICK if seconds > SLOWEST_TOKEN and before != self._collections else seconds


def _full_collections() -> int:
    collections: int = gc.get_stats()[-1]["collections"]
    return collections


def _with_time(report: GuideReport, seconds: float) -> GuideReport:
    """Add the time to a guide's report; a guide that is too slow gets a problem, so that it can't continue."""
    if seconds > SLOWEST_TOKEN and not report.problem and not report.ended:
        problem = f"following one token took {seconds:.2f} s, and {SLOWEST_TOKEN:g} s are possible: it is ambiguous"
        report = report._replace(problem=problem)
    return report._replace(seconds=seconds)


def _limits(row: Row) -> str:
    """Name the options that the row's guide follows, for messages."""
    sampling = row.request.sampling
    restrictions = {"allowed_token_ids": sampling.allowed_token_ids, "bad_words": sampling.bad_words}
    return " with ".join((["grammar"] if sampling.structured or not sampling.restricted else [])
                         + [name for name, value in restrictions.items() if value])  # fmt: skip


def _guide_error(row: Row, problem: str) -> RekindleError:
    return NoTokenLeft(
        f"The {_limits(row)} of request {row.request.id} can't go on after {row.generated} tokens: {problem}. "
        + ("Change one of them." if row.request.sampling.restricted else "Simplify it.")
    )


def _own_failure(row: Row, raised: BaseException) -> RekindleError:
    return own_failure(raised, f"the {_limits(row)} of request {row.request.id} failed")


def _guided(plan: StepPlan, decode_rows: int) -> Iterator[tuple[int, Row, GuideLike]]:
    """Yield the rows that choose among allowed tokens, with their places in the program."""
    for rows, first in ((plan.decode, 0), (plan.prefill, decode_rows)):
        for index, row in enumerate(rows, start=first):
            extensions = row.request.extensions
            if extensions and row.samples and (guidance := extensions.get(Guidance)) is not None:
                yield index, row, guidance.guide
