"""A capability of requests: what one of them checks at intake, carries with a request, and adds to the output.

Each is one class, in a folder of `capabilities`. Intake and detokenize go through `capabilities.Capabilities` in order
and name none. What carries on from there reads its extension: a follower in the scheduler, and a
`programs.feature.Feature` in the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from rekindle._src.core.extension import NONE, Extension, Extensions
from rekindle._src.core.records import EmbeddingResult, FinishReason, IntArray, Request, Timings, TokenEvent, Usage
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.threads import Mailbox, OneShot
from rekindle.errors import PromptTooLong

R = TypeVar("R")  # what a capability waits for before a request is admitted, such as a compiled grammar; or None
E = TypeVar("E")  # what a part waits for before its sequence is complete, such as whole files; or None
Fields = Mapping[str, Any]  # of a `TextDelta` or a `Completion`
NO_FIELDS: Fields = {}


class SequenceEnd(NamedTuple):
    """How a sequence ended."""

    reason: FinishReason
    text: str
    tokens: list[int]
    ends: Sequence[int]  # of each token with a text, the place of its end in all decoded text


class Part(Generic[E]):
    """A capability's part of one sequence's output. This one adds nothing; it is the base of all others."""

    __slots__ = ()
    visible: frozenset[str] = frozenset()  # special tokens that need a text, because the part reads them
    opens: bool = False  # `open` is to be awaited before the request is handed on
    last_work: str = ""  # the work that the completion waits for, in words

    async def open(self, mailbox: Mailbox) -> None:
        """Make the resources that the output needs. Raise the request's error if they can't be made."""

    def take(self, event: TokenEvent) -> None:
        """Add an event's data for this part."""

    def cut(self, count: int) -> None:
        """Drop what belongs to tokens after the first `count`: a stop string ended the text there."""

    def delta(self, text: str, start: int, stop: int, reason: FinishReason | None) -> Fields:
        """Return the fields of a delta of `text` and of the tokens [start, stop)."""
        return NO_FIELDS

    def ending(self, count: int) -> OneShot[E] | None:
        """Return the value that the completion of `count` tokens waits for; it is then passed to `take_over`."""
        return None

    def take_over(self, value: E) -> None:
        """Take what `ending` has waited for."""

    def completion(self, end: SequenceEnd) -> Fields:
        """Return the fields of the completion."""
        return NO_FIELDS

    def outcome(self, usage: Usage, timings: Timings) -> EmbeddingResult | None:
        """Return the outcome that takes the place of a completion, in requests that generate nothing."""
        return None

    def close(self, reason: FinishReason, count: int) -> None:
        """Release the resources of the part; its sequence has ended with `count` tokens."""


class KeyedPrompt(NamedTuple):
    """A prompt to look up in the cache: everything that its pages depend on, and nothing that runs."""

    token_ids: IntArray
    sampling: Sampling
    extensions: Extensions = NONE  # what its caller has resolved, as in a submission


class ReadPrompt(NamedTuple):
    """A submission with its prompt as it was read."""

    submission: Submission
    token_ids: IntArray


class PromptFit:
    """The choice of a submission's prompt by its length. This one has a single prompt; it is the base of all others."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission

    async def next(self, read: ReadPrompt | PromptTooLong | None) -> ReadPrompt | Submission:
        """Return the prompt to run, or a submission to read the prompt of next. The first call is with None.

        Raise the request's error if no prompt fits. A prompt may be too long to be encoded.
        """
        if isinstance(read, PromptTooLong):
            raise read
        return self._submission if read is None else read


class Capability(Generic[R]):
    """A capability that no request uses, and the base of all others."""

    def fit(self, submission: Submission, front: Front) -> PromptFit | None:
        """Return the choice of the submission's prompt by its length; None if there is a single prompt."""
        return None

    def spell(self, submission: Submission, text: str, front: Front) -> str:
        """Return the text of the prompt as it is encoded. Raise the request's error."""
        return text

    def expand(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        """Return the token ids of the prompt with placeholder tokens expanded. Raise the request's error."""
        return token_ids

    def waits(self, submission: Submission, front: Front) -> bool:
        """True if a submission has to wait before it is admitted, so that others go on meanwhile."""
        return False

    def overtaken(self, submission: Submission, front: Front) -> bool:
        """True if controls and later submissions go on while it waits: that can take minutes."""
        return False

    async def resource(self, submission: Submission, front: Front) -> R:
        """Wait for a resource that `admit` needs, such as a compiled grammar. Raise the request's error."""
        nothing: Any = None
        return nothing

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: R | None) -> Extension | None:
        """Return the extension of a request with this prompt; None if it does not use the capability.

        Raise `InvalidRequest` if the request can't be met. The method `resource` has returned the `resource`.
        """
        return None

    def slow(self, submission: Submission) -> bool:
        """True if `admit` may take long. A process that takes requests from others calls it in a thread then."""
        return False

    def keying(self, prompt: KeyedPrompt, front: Front) -> Extension | None:
        """Return the extension that enters the keys of the prompt's pages, without waiting for resources of `admit`.

        Raise `InvalidRequest` if the request can't be met. Overridden where extensions override `altered` or `names`.
        """
        return None

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        """Return the capability's part of a sequence's output; None if it has none."""
        return None
