"""Log-probabilities as a capability of requests."""

from __future__ import annotations

from rekindle._src.core.extensions import PromptScoring
from rekindle._src.core.records import FinishReason, IntArray, Request, TokenEvent, TokenLogprobs
from rekindle._src.core.report_kinds import LOGPROBS, PROMPT_LOGPROBS
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Fields, Part, SequenceEnd


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
