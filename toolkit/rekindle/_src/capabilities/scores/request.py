"""Log-probabilities as a capability of requests."""

from __future__ import annotations

import dataclasses

from rekindle._src.core.records import FinishReason, IntArray, Request, Row, RowResult, TokenEvent, TokenLogprobs
from rekindle._src.core.report_kinds import LOGPROBS, PROMPT_LOGPROBS
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Fields, Part, SequenceEnd
from rekindle._src.kvcache import PrefixCache
from rekindle._src.scheduling.followers import FollowedExtension, Follower


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptScoring(FollowedExtension):
    """The prompt's own tokens have log-probabilities."""

    first: int  # position of the first scores to read, which are for the token after it

    def reusable(self, prompt_length: int) -> int:
        return min(prompt_length, self.first)

    def follower(self, request: Request, cache: PrefixCache | None) -> Follower:
        return PromptScores(request, self.first)


class ScoreIntake(Capability[None]):
    """Log-probabilities of the output and of the prompt."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: None) -> PromptScoring | None:
        sampling = submission.sampling
        return None if sampling.prompt_logprobs is None else PromptScoring(sampling.scored_from)

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        sampling = request.sampling
        if not sampling.scored:
            return None
        return ScoreOutput(output=sampling.logprobs is not None, prompt=sampling.prompt_logprobs is not None)


class ScoreOutput(Part[None]):
    __slots__ = ("_delivered", "_logprobs", "_of_output", "_of_prompt", "_prompt_logprobs")

    def __init__(self, *, output: bool, prompt: bool) -> None:
        self._of_output, self._of_prompt = output, prompt
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._delivered = 0  # of the prompt's

    def take(self, event: TokenEvent) -> None:
        if event.token_ids:  # a request for no tokens samples one nevertheless
            self._logprobs += LOGPROBS.of(event)
        self._prompt_logprobs += PROMPT_LOGPROBS.of(event)

    def cut(self, count: int) -> None:
        del self._logprobs[count:]

    def delta(self, text: str, start: int, stop: int, reason: FinishReason | None) -> Fields:
        first, self._delivered = self._delivered, len(self._prompt_logprobs)
        return {
            "logprobs": tuple(self._logprobs[start:stop]),
            "prompt_logprobs": tuple(self._prompt_logprobs[first:]),
        }

    def completion(self, end: SequenceEnd) -> Fields:
        return {
            "logprobs": tuple(self._logprobs) if self._of_output else None,
            "prompt_logprobs": tuple(self._prompt_logprobs) if self._of_prompt else None,
        }
