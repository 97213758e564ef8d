"""Guidance: the guide that a request carries, its reports on tokens, and the follower of these in the scheduler."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rekindle._src.core.records import FinishReason, GuideLike, GuideReport, Request, Row, RowResult
from rekindle._src.core.report import Report
from rekindle._src.scheduling.drafting.proposal import OwnDrafts, Proposal
from rekindle._src.scheduling.followers import CostlyFollower, FollowedExtension

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rekindle._src.kvcache import PrefixCache

GUIDED: Report[GuideReport] = Report("guided")  # by the guide, on the token

MAX_DRAFTS = 7  # drafts of one step
_PAUSE_BELOW = 0.5  # share of accepted drafts below which a model is assumed to spell otherwise
_TRIED = 16  # drafts after which that share is judged
_LATEST = 0.25  # weight of the latest token's time
_SPIKE = 0.005  # seconds that a grammar may take for a single token and not be slow


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Guidance(FollowedExtension):
    """A guide decides how the text may go on. It changes with each token, on the device's thread."""

    guide: GuideLike

    def resume(self, token_ids: NDArray[np.int32]) -> None:
        for token in token_ids.tolist():
            self.guide.consume(token)

    def another(self) -> Guidance:
        return Guidance(self.guide.copy())

    @property
    def ends_itself(self) -> bool:
        return True

    @property
    def needs_masks(self) -> bool:
        return True

    def follower(self, request: Request, cache: PrefixCache | None) -> ForcedTokens:
        return ForcedTokens()


class ForcedTokens(CostlyFollower, OwnDrafts):
    """The tokens that a request's grammar forces, in the tokenizer's usual spelling, and the time that it takes.

    They are proposed as drafts; see `drafting`.
    """

    __slots__ = ("_ahead", "_before", "_usual", "cost", "count", "turn")
    words = "drafts of forced tokens"

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self._ahead: tuple[int, ...] = ()
        self.count = 0  # generated tokens that were forced
        self._before = 0.0  # seconds that it took for the token before
        self._usual = 0.0  # seconds that the grammar takes for a token
        self.cost = 0.0  # seconds that it is likely to take for the next one
        self.turn = 0  # when it last ran although it is slow

    def take(self, row: Row, output: RowResult) -> RowResult:
        for report in GUIDED.of(output):
            self.add(report)
        return output

    def ran(self, turn: int) -> None:
        self.turn = turn

    def seconds(self, output: RowResult) -> float:
        return sum(report.seconds for report in GUIDED.of(output)) if output.reports else 0.0

    def ends(self, output: RowResult) -> FinishReason | None:
        report = next(iter(GUIDED.of(output)), None) if output.reports else None
        if report is None or not report.ended:
            return None
        if report.by_eos:
            return FinishReason.EOS
        return FinishReason.LENGTH if report.steered else FinishReason.GRAMMAR

    def describe(self) -> str:
        return f"its grammar left no choice for {self.count} of them"

    def add(self, report: GuideReport) -> None:
        """Add the guide's report on the request's next token."""
        self._ahead = report.ahead
        self.ready = bool(report.ahead)
        self.count += report.forced
        # Single tokens of any text in JSON take a millisecond; an ambiguous grammar takes longer with every token.
        seconds = report.seconds - report.searched
        latest = seconds if seconds > _SPIKE else min(seconds, self._before)
        self._before = seconds
        self._usual += _LATEST * (latest - self._usual)
        self.cost = self._usual + report.due

    def propose(self, skip: int, most: int) -> Proposal | None:
        """Return up to `MAX_DRAFTS` tokens from `skip` positions past the known ones on.

        None where few of them were accepted so far: the model spells otherwise.
        """
        tokens = self._ahead[skip : skip + min(most, MAX_DRAFTS)]
        rate = (self.accepted + 1) / (self.drafted + 1)
        if not tokens or (self.drafted >= _TRIED and rate < _PAUSE_BELOW):
            return None
        return Proposal(tokens, (rate,) * len(tokens))
