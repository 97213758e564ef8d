"""What the scheduler knows about one request while it lives: its tokens, its pages, and how far each of them is.

Three counts follow a sequence, each ahead of the one before: `computed` positions were committed, `planned` positions
are in the cache once every step in flight has run, and `length` tokens exist once they have. A decode step is planned
while the token it reads is still on the device, so `length` counts tokens whose values the host does not know yet.
"""

from __future__ import annotations

import numpy as np

from rekindle.records import FinishReason, IntArray, Request, Status

_ROOM = 64  # tokens by which a sequence's buffer grows at least


class Sequence:
    """Mutable state of one request; the scheduler is its only owner."""

    __slots__ = (
        "_tokens", "arrived", "cached_tokens", "computed", "epoch", "error", "fresh", "generated", "in_flight", "known",
        "limit", "limit_reason", "overtaken", "pages", "planned", "preemptions", "reason", "request", "sampled",
        "scored", "slot", "status", "target",
    )  # fmt: skip

    def __init__(self, request: Request, arrived: int, limit: int, limit_reason: FinishReason) -> None:
        self.request = request
        self.arrived = arrived  # order of submission
        self.limit = limit  # tokens it may generate, known before the first one is
        self.limit_reason = limit_reason
        self.status = Status.QUEUED
        self.reason = ""  # why it has this status, for explain()
        self.error: BaseException | None = None
        self.epoch = 0
        self.slot = -1
        self.pages: list[int] = []
        self.fresh = True  # no row of this epoch was planned yet
        self.in_flight = 0  # steps that contain it and were neither committed nor failed
        self.known = request.prompt_length  # tokens whose values the host has
        self.generated = 0  # of them, not the prompt's
        self.sampled = 0  # generated, plus those that steps in flight will add
        self.computed = 0
        self.planned = 0
        self.target = 0  # positions to prefill in this epoch: the prompt, and what was generated before a preemption
        self.scored = 0  # prompt positions whose log-probabilities have been delivered
        self.cached_tokens = 0  # of the prompt, found in the cache when it was first admitted
        self.preemptions = 0
        self.overtaken = 0
        self._tokens = request.token_ids

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def length(self) -> int:
        return self.request.prompt_length + self.sampled

    @property
    def prefilling(self) -> bool:
        return self.planned < self.target

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def remaining(self) -> int:
        return self.limit - self.sampled

    def tokens(self, start: int, stop: int) -> IntArray:
        """Values of the tokens [start, stop), all of which must be known."""
        assert stop <= self.known, f"{self.id}: token {stop - 1} is not known yet, {self.known} are"
        return self._tokens[start:stop]

    def outputs(self) -> IntArray:
        """The generated tokens that the host knows."""
        return self._tokens[self.request.prompt_length : self.known]

    def append(self, token: int) -> None:
        if self.known == len(self._tokens):
            # The old buffer may still be read through rows of steps in flight, so it is left as it is.
            grown = np.empty(self.known + max(_ROOM, self.known // 4), np.int32)
            grown[: self.known] = self._tokens
            self._tokens = grown
        self._tokens[self.known] = token
        self.known += 1
        self.generated += 1

    def begin(self, slot: int, start: int) -> None:
        """A new epoch in `slot`, with the positions [0, start) already in its pages."""
        assert self.in_flight == 0 and self.sampled == self.generated, f"{self.id} is admitted with steps in flight"
        self.epoch += 1
        self.slot = slot
        self.fresh = True
        self.computed = self.planned = start
        self.target = self.known
        self.status = Status.PREFILL


_ENDED = frozenset({Status.FINISHED, Status.FAILED, Status.ABORTED})
