"""Draft tokens from a grammar: the text that it forces after the known tokens, in the tokenizer's usual spelling."""

from __future__ import annotations

import numpy as np

from rekindle._src.core.guides import Guided
from rekindle._src.core.records import IntArray

MAX_DRAFTS = 7  # drafts of one step
_PAUSE_BELOW = 0.5  # share of accepted drafts below which a model is assumed to spell otherwise
_TRIED = 16  # drafts after which that share is judged
_LATEST = 0.25  # weight of the latest token's time
_SPIKE = 0.005  # seconds that a grammar may take for a single token and not be slow


class ForcedTokens:
    """The forced tokens of one request, and the cost of its grammar; proposes drafts as `PromptLookup` does."""

    __slots__ = ("_ahead", "_before", "_usual", "accepted", "cost", "count", "drafted", "turn")

    def __init__(self) -> None:
        self._ahead: tuple[int, ...] = ()
        self.count = 0  # generated tokens that were forced
        self.drafted = self.accepted = 0
        self._before = 0.0  # seconds that it took for the token before
        self._usual = 0.0  # seconds that the grammar takes for a token
        self.cost = 0.0  # seconds that it is likely to take for the next one
        self.turn = 0  # when it last ran although it is slow

    def take(self, report: Guided) -> None:
        """Add the guide's report on the request's next token."""
        self._ahead = report.ahead
        self.count += report.forced
        # Single tokens of any text in JSON take a millisecond; an ambiguous grammar takes longer with every token.
        seconds = report.seconds - report.searched
        latest = seconds if seconds > _SPIKE else min(seconds, self._before)
        self._before = seconds
        self._usual += _LATEST * (latest - self._usual)
        self.cost = self._usual + report.due

    def ready(self, skip: int) -> bool:
        """True if there are tokens to propose from `skip` positions past the known ones on."""
        return len(self._ahead) > skip and not (self.drafted >= _TRIED and self._rate < _PAUSE_BELOW)

    def max_drafts(self, skip: int) -> int:
        return min(MAX_DRAFTS, len(self._ahead) - skip)

    def expected(self, skip: int) -> float:
        """Return how many drafts are likely to be accepted."""
        return self.max_drafts(skip) * self._rate

    def propose(self, skip: int, count: int) -> IntArray:
        return np.array(self._ahead[skip : skip + count], np.int32)

    def learn(self, drafted: int, accepted: int) -> None:
        """Count the drafts that a step checked."""
        self.drafted += drafted
        self.accepted += accepted

    @property
    def _rate(self) -> float:
        return (self.accepted + 1) / (self.drafted + 1)
