"""Samplers as a capability of requests."""

from __future__ import annotations

import threading

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.samplers.breakers import BreakerTable, BreakerTables
from rekindle._src.core.extension import Extension
from rekindle._src.core.records import IntArray, Request, Row, RowResult
from rekindle._src.core.report import Report
from rekindle._src.core.samplers import ADAPTIVE
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability
from rekindle._src.dispatch.intake import Turns
from rekindle._src.kvcache import PrefixCache
from rekindle._src.scheduling.followers import FollowedExtension, Follower
from rekindle.errors import InvalidRequest

CARRIED: Report[tuple[float, ...]] = Report("carried")  # numbers of a sampler, after the token


class SamplerChain(FollowedExtension):
    """The samplers of a request, and the numbers that the last one carries, after each of its tokens."""

    __slots__ = ("_after", "_first", "_sampling", "breakers", "carries")

    def __init__(self, sampling: Sampling, breakers: BreakerTable | None) -> None:
        self.breakers = breakers  # None without DRY
        self._sampling = sampling
        if sampling.mirostat:
            self.carries, self._first = True, (2.0 * sampling.mirostat_tau, 0.0)
        else:
            self.carries, weights = ADAPTIVE in sampling.order, 1.0 / (1.0 - sampling.adaptive_decay)
            self._first = (sampling.adaptive_target * weights, weights) if self.carries else (0.0, 0.0)
        self._after: list[tuple[float, ...]] = []

    def carried(self, generated: int) -> tuple[float, ...]:
        """Return the numbers after so many generated tokens."""
        return self._after[generated - 1] if self.carries and generated else self._first

    def follower(self, request: Request, cache: PrefixCache | None) -> Follower | None:
        return CarriedNumbers(self._after, request.prompt_length) if self.carries else None

    def another(self) -> Extension:
        return SamplerChain(self._sampling, self.breakers)

    def resume(self, token_ids: NDArray[np.int32]) -> None:
        """Raise InvalidRequest if it carries numbers, which the other process took with it."""
        if self.carries and len(token_ids):
            field = "mirostat" if self._sampling.mirostat else "adaptive_target"
            problem = "can't go on in another process, since its state was in the one that ended"
            raise InvalidRequest(field, getattr(self._sampling, field), problem, "Submit the request again")


class CarriedNumbers(Follower):
    """Keeps the numbers after each token, for the case that the request has to enter a slot again."""

    __slots__ = ("_after", "_prompt_length")

    def __init__(self, after: list[tuple[float, ...]], prompt_length: int) -> None:
        self._after, self._prompt_length = after, prompt_length

    def take(self, row: Row, output: RowResult) -> RowResult:
        for numbers in CARRIED.of(output):
            del self._after[row.start + row.length - self._prompt_length :]
            self._after.append(numbers)
        return output.reporting(CARRIED)


class SamplersIntake(Capability["BreakerTable | None"]):
    """Samplers beyond temperature, top_k, top_p and min_p, and an order of them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: BreakerTables | None = None
        self._turns: Turns | None = None  # made on the loop

    def waits(self, submission: Submission, front: Front) -> bool:
        """True if the vocabulary has to be searched for its breakers."""
        breakers = _breakers(submission.sampling)
        return bool(breakers) and front.tokenizer.has_text and self._of(front).find(breakers) is None

    async def resource(self, submission: Submission, front: Front) -> BreakerTable | None:
        breakers = _breakers(submission.sampling)
        if not breakers or not front.tokenizer.has_text:
            return None
        tables = self._of(front)
        if self._turns is None:
            self._turns = Turns(1)
        async with self._turns.turn(submission.caller):  # those that wait take no thread, which others need
            known = tables.find(breakers)
            return await anyio.to_thread.run_sync(tables.table, breakers) if known is None else known

    def admit(
        self, submission: Submission, token_ids: IntArray, front: Front, resource: BreakerTable | None
    ) -> SamplerChain | None:
        sampling = submission.sampling
        if not sampling.extended:
            return None
        breakers = _breakers(sampling)
        if resource is None and breakers and front.tokenizer.has_text:  # nothing had to be waited for
            tables = self._of(front)
            resource = tables.find(breakers) or tables.table(breakers)
        return SamplerChain(sampling, resource)

    def _of(self, front: Front) -> BreakerTables:
        with self._lock:
            if self._tables is None:
                self._tables = BreakerTables(front.tokenizer, front.vocab_size)
            return self._tables


def _breakers(sampling: Sampling) -> tuple[str, ...]:
    """Return the breakers of a request with DRY; of others none."""
    return sampling.dry_sequence_breakers if sampling.extended and "dry" in sampling.order else ()
