"""Followers: keep a step feature's state for one request, and take the request's results.

Most requests have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.captured import CapturedPart
from rekindle._src.core.extension import Extension
from rekindle._src.core.extensions import Guidance, PromptPooling, PromptScoring
from rekindle._src.core.records import GuideReport, Pooling, Request, Row, RowResult
from rekindle._src.core.report_kinds import CAPTURED, GUIDED, POOLED, PROMPT_LOGPROBS
from rekindle._src.core.tapped import RequestTaps
from rekindle._src.kvcache.kept import KeptCaptures, parts_by_page
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


class PromptScores(Follower):
    """Delivers each position's log-probabilities once: after a preemption, positions are computed again."""

    __slots__ = ("_first", "_length", "_scored")

    def __init__(self, request: Request, first: int) -> None:
        self._first, self._length = first, request.prompt_length
        # Positions that were delivered, or that need not be.
        self._scored = self._first + (0 if request.resumed is None else request.resumed.scored)

    def reusable(self, known: int) -> int:
        return min(known - 1, self._scored) if self._scored < self._length else known

    def take(self, row: Row, output: RowResult) -> RowResult:
        before = max(0, self._scored - max(row.start, self._first))
        self._scored = max(self._scored, min(row.start + row.length, self._length))
        return output.reporting(PROMPT_LOGPROBS, *PROMPT_LOGPROBS.of(output)[before:]) if before else output


class CaptureFollower(Follower):
    """Delivers what each wanted position has captured once: after a preemption, positions are computed again."""

    __slots__ = ("_delivered", "_tapped")

    def __init__(self, tapped: RequestTaps) -> None:
        self._tapped = tapped
        self._delivered = 0  # positions before it were delivered

    def reusable(self, known: int) -> int:
        return min(known, self._tapped.next_wanted(self._delivered))

    def take(self, row: Row, output: RowResult) -> RowResult:
        before, self._delivered = self._delivered, max(self._delivered, row.start + row.length)
        if before <= row.start:
            return output
        parts = [part.behind(before) for part in CAPTURED.of(output)]
        return output.reporting(CAPTURED, *[part for part in parts if part is not None])


class CaptureFileFollower(CaptureFollower):
    """Delivers captures and keeps them: pages with kept captures may come from the cache."""

    __slots__ = ("_answer", "_from_cache", "_kept", "_names", "_parts", "_request")
    keeps = True

    def __init__(self, request: Request, tapped: RequestTaps, kept: KeptCaptures) -> None:
        super().__init__(tapped)
        self._request, self._kept = request, kept
        self._names: tuple[bytes | None, list[bytes]] = None, []  # of the prompt's pages, with the cache's root
        self._answer = (-1, -1), 0  # the latest of `reusable`, and what it was for
        self._from_cache: CapturedPart | None = None  # to be delivered with the first row
        self._parts: defaultdict[int, list[CapturedPart]] = defaultdict(list)  # by page, until it is published

    def reusable(self, known: int) -> int:
        if self._answer[0] != (self._kept.version, self._delivered):
            reached = self._kept.reach(self._prompt_names(), self._tapped.keys, self._tapped, self._delivered)
            self._answer = (self._kept.version, self._delivered), reached
        return min(known, self._answer[1])

    def _prompt_names(self) -> list[bytes]:
        root, names = self._names
        if root != self._kept.root_key:
            request = self._request
            names = self._kept.names(request.prefix(self._kept.page_size).first(request.prompt_length))
            self._names = self._kept.root_key, names
        return names

    def begin(self, start: int) -> None:
        self._parts.clear()
        self._from_cache = None
        size, keys = self._kept.page_size, self._tapped.keys
        positions = self._tapped.wanted_in(self._delivered, start)
        if not len(positions):
            return
        names, pages = self._prompt_names(), positions // size
        read = [self._kept.get(names[page], keys, positions[pages == page] % size) for page in np.unique(pages)]
        self._kept.use(names)
        arrays = {key: np.concatenate([lines[key] for lines in read]) for key in keys}
        self._from_cache = CapturedPart(positions, arrays)

    def take(self, row: Row, output: RowResult) -> RowResult:
        for captured in CAPTURED.of(output):
            for page, part in parts_by_page(captured, self._kept.page_size):
                self._parts[page].append(part)
        output, first = super().take(row, output), self._from_cache
        if first is None:
            return output
        self._from_cache = None
        return output.reporting(CAPTURED, CapturedPart.joined([first, *CAPTURED.of(output)]))

    def published(self, names: Sequence[bytes]) -> None:
        for page in [page for page in self._parts if page < len(names)]:
            part = CapturedPart.joined(self._parts.pop(page))
            self._kept.put(names[page], part.positions % self._kept.page_size, dict(part.arrays))
        self._kept.use(names)


class PoolingFollower(Follower):
    """Adds up the vectors of a prompt's chunks, or keeps the last or the first one. The first chunk begins anew.

    The vector of the last token needs no other position's, so that these may come from the cache.
    """

    __slots__ = ("_length", "_pooling", "_vector")

    def __init__(self, request: Request, pooling: Pooling) -> None:
        self._length, self._pooling = request.prompt_length, pooling
        self._vector: NDArray[np.float64] | None = None

    def reusable(self, known: int) -> int:
        return known - 1 if self._pooling == "last" else 0

    def take(self, row: Row, output: RowResult) -> RowResult:
        (pooled,) = POOLED.of(output)
        if not np.isfinite(pooled).all():
            return output._replace(finite=False)
        chunk = pooled.astype(np.float64)
        if self._pooling == "last" or self._vector is None or row.start == 0:
            self._vector = chunk
        elif self._pooling == "mean":
            self._vector += chunk
        whole = (self._vector / self._length if self._pooling == "mean" else self._vector).astype(np.float32)
        return output.reporting(POOLED, *([whole] if row.start + row.length >= self._length else []))


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


def _captures(tapped: RequestTaps, request: Request, kept: KeptCaptures | None) -> Follower | None:
    if not tapped.keys:
        return None
    return CaptureFileFollower(request, tapped, kept) if kept is not None and tapped.keep else CaptureFollower(tapped)


FollowerOf = Callable[[Any, Request, KeptCaptures | None], Follower | None]
FOLLOWERS: dict[type[Extension], FollowerOf] = {  # by the extension that is followed
    PromptScoring: lambda scored, request, kept: PromptScores(request, scored.first),
    PromptPooling: lambda pooling, request, kept: PoolingFollower(request, pooling.kind),
    RequestTaps: _captures,
    Guidance: lambda guidance, request, kept: ForcedTokens(),
}


def followers_of(request: Request, kept: KeptCaptures | None = None) -> tuple[Follower, ...]:
    """Return the followers of a new request. `kept` are the captures of earlier ones, if any are."""
    if not request.extensions:
        return ()
    found = (FOLLOWERS[kind](one, request, kept) for kind, one in request.extensions.items() if kind in FOLLOWERS)
    return tuple(follower for follower in found if follower is not None)
