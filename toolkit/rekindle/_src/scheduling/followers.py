"""Followers: keep a step feature's state for one request, and take the request's results.

Most requests have none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rekindle._src.core.extension import Extension
from rekindle._src.core.extensions import Guidance
from rekindle._src.core.records import GuideReport, Request, Row, RowResult
from rekindle._src.core.report_kinds import GUIDED
from rekindle._src.kvcache import PrefixCache
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts

MAX_DRAFTS = 7  # drafts of one step
_PAUSE_BELOW = 0.5  # share of accepted drafts below which a model is assumed to spell otherwise
_TRIED = 16  # drafts after which that share is judged
_LATEST = 0.25  # weight of the latest token's time
_SPIKE = 0.005  # seconds that a grammar may take for a single token and not be slow


class Follower:
    """Follows one request; the base of all others."""

    __slots__ = ()
    keeps = False  # what it follows goes to the cache, too: `published` is called

    def reusable(self, known: int) -> int:
        """Return how many of the `known` tokens may have pages from the cache: of others results are still needed."""
        return known

    def begin(self, start: int) -> None:
        """Begin anew: the request was admitted, with the positions before `start` from the cache."""

    def take(self, row: Row, output: RowResult) -> RowResult:
        """Take the result of a committed row. Return the result for the caller."""
        return output

    def published(self, names: Sequence[bytes]) -> None:
        """Note that the request's leading pages are in the cache by these names."""


class FollowedExtension(Extension):
    """An extension with a follower in the scheduler. The base of all others."""

    __slots__ = ()

    @abstractmethod
    def follower(self, request: Request, cache: PrefixCache | None) -> Follower | None:
        """Return a new follower of the request; None if it needs none. Requests share pages through the `cache`."""


class ForcedTokens(Follower, RequestDrafts):
    """Of a guided request: the tokens that its grammar forces, in the tokenizer's usual spelling, and its cost.

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


def followers_of(request: Request, cache: PrefixCache | None = None) -> tuple[Follower, ...]:
    """Return the followers of a new request; the `cache` has its pages, if requests share any."""
    if not request.extensions:
        return ()
    extensions = [one for one in request.extensions.values() if isinstance(one, FollowedExtension)]
    followers = [follower for one in extensions if (follower := one.follower(request, cache)) is not None]
    return (*followers, ForcedTokens()) if Guidance in request.extensions else tuple(followers)
