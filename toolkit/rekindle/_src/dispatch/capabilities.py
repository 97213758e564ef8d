"""The capabilities of requests, in the order of their checks at intake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle._src.core.extension import NONE, Extension, Extensions
from rekindle._src.core.extensions import PromptPooling, PromptScoring
from rekindle._src.core.records import (
    EmbeddingResult,
    FinishReason,
    IntArray,
    Request,
    Timings,
    TokenEvent,
    TokenLogprobs,
    Usage,
    Vector,
)
from rekindle._src.core.reply import Reply, ReplyEvent, fold
from rekindle._src.core.report_kinds import LOGPROBS, POOLED, PROMPT_LOGPROBS
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Fields, KeyedPrompt, Part, SequenceEnd
from rekindle._src.dispatch.captures import TapIntake
from rekindle._src.dispatch.pictures import PictureIntake
from rekindle._src.dispatch.structures import StructureIntake
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.text.replies import ReplyPlan, ReplyScanner
    from rekindle._src.text.replies.history import WrittenReplies

Resources = Mapping[Capability, Any]
NO_RESOURCES: Resources = MappingProxyType({})


class EmbeddingIntake(Capability):
    """A prompt is embedded rather than continued."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: Any) -> PromptPooling | None:
        pooling = submission.extensions.get(PromptPooling)
        if front.embedder.alone and pooling is None:
            problem = "is for embed only: its texts have no next token"
            raise InvalidRequest("model", front.model, problem, "Use session.embed, or POST /v1/embeddings")
        return pooling

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        return EmbeddingOutput() if PromptPooling in request.extensions else None


class EmbeddingOutput(Part):
    __slots__ = ("_vector",)

    def __init__(self) -> None:
        self._vector: Vector | None = None

    def take(self, event: TokenEvent) -> None:
        for vector in POOLED.of(event):
            self._vector = vector

    def outcome(self, usage: Usage, timings: Timings) -> EmbeddingResult:
        assert self._vector is not None, "a prompt's end comes with its vector"
        return EmbeddingResult(self._vector, usage, timings)


class TokenIdIntake(Capability):
    """The token ids of the prompt and of options are the model's."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: Any) -> None:
        sampling, vocab = submission.sampling, front.vocab_size
        if not len(token_ids):
            raise InvalidRequest("prompt", submission.text, "has no tokens", "Pass at least one character or token id")
        for field, ids in (
            ("prompt", token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", tuple(sampling.logit_bias)),
            ("logprob_token_ids", sampling.logprob_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ):
            if len(ids):
                found = token_ids if ids is token_ids else np.asarray(ids, np.int64)
                if found.min() < 0 or found.max() >= vocab:
                    wrong = found[(found < 0) | (found >= vocab)][0].item()
                    fix = f"Use ids from 0 to {vocab - 1}"
                    raise InvalidRequest(field, wrong, "is not a token id of this model", fix)


class ProcessorIntake(Capability):
    """Logits processors of the session."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: Any) -> None:
        for name in submission.sampling.processors:
            if name not in front.processors:
                known = ", ".join(map(repr, front.processors)) or "none"
                fix = f"Give it to open(processors=[…]); known: {known}"
                raise InvalidRequest("processors", name, "is not a processor of this session", fix)


class AdapterIntake(Capability):
    """Adapters of the session."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: Any) -> Extension | None:
        return self._use(submission.sampling, front)

    def keying(self, prompt: KeyedPrompt, front: Front) -> Extension | None:
        return self._use(prompt.sampling, front)

    def _use(self, sampling: Sampling, front: Front) -> Extension | None:
        if sampling.adapter is None:
            return None
        if front.adapters is None:
            fix = "Use a session of one device, opened with rekindle.open"
            raise InvalidRequest("adapter", sampling.adapter, "can't be used here", fix)
        return front.adapters.use(sampling.adapter)


class PriorityIntake(Capability):
    """The order of requests in a session with that policy."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: Any) -> None:
        priority, policy = submission.sampling.priority, front.config.policy
        if priority and policy != "priority":
            problem = f"means nothing under policy={policy!r}"
            raise InvalidRequest("priority", priority, problem, 'Open with policy="priority"')


class ScoreIntake(Capability):
    """Log-probabilities of the output and of the prompt."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: Any) -> PromptScoring | None:
        sampling = submission.sampling
        return None if sampling.prompt_logprobs is None else PromptScoring(sampling.scored_from)

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        sampling = request.sampling
        if not sampling.scored:
            return None
        return ScoreOutput(output=sampling.logprobs is not None, prompt=sampling.prompt_logprobs is not None)


class ScoreOutput(Part):
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ChatReply(Extension):
    """Of a submission: how a chat's reply is read for reasoning and calls of tools."""

    plan: ReplyPlan


class ReplyIntake(Capability):
    """A chat's reply is read for reasoning and calls of tools; earlier ones stay as their model wrote them."""

    def __init__(self) -> None:
        self._written: WrittenReplies | None = None  # of this session, once there are any

    def expand(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        if self._written is None or ChatReply not in submission.extensions:
            return token_ids
        return self._written.restored(token_ids, front.tokenizer.eos_ids, partial(_decoded, front))

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        reply = submission.extensions.get(ChatReply)
        if reply is None:
            return None
        scanner = reply.plan.scanner(submission.text or "", request.token_ids.tobytes(), request.sampling.seed)
        return ReplyOutput(scanner, reply.plan.visible, partial(self._keep, request, reply.plan, front))

    def _keep(self, request: Request, plan: ReplyPlan, front: Front, reply: Reply, token_ids: Sequence[int]) -> None:
        if self._written is None:
            from rekindle._src.text.replies.history import WrittenReplies  # chats alone need it

            self._written = WrittenReplies()
        self._written.add(request.token_ids, token_ids, reply, plan, partial(_decoded, front))


def _decoded(front: Front, token_ids: Sequence[int]) -> str:
    return front.tokenizer.decode(token_ids, skip_special_tokens=False)


class ReplyOutput(Part):
    __slots__ = ("_events", "_keep", "_scanner", "visible")

    def __init__(
        self, scanner: ReplyScanner, visible: frozenset[str], keep: Callable[[Reply, Sequence[int]], None]
    ) -> None:
        self._scanner, self.visible = scanner, visible
        self._keep = keep  # takes a reply that its model has ended, and its tokens
        self._events: list[ReplyEvent] = []

    def delta(self, text: str, start: int, stop: int, reason: FinishReason | None) -> Fields:
        events = self._scanner.feed(text)
        events += self._scanner.finish() if reason is not None else ()
        self._events += events
        return {"events": tuple(events)}

    def completion(self, end: SequenceEnd) -> Fields:
        reply = fold(self._events)
        if end.reason is FinishReason.EOS:
            self._keep(reply, end.tokens[:-1])
        return {"reply": reply}


def _overrides(capability: Capability, method: str) -> bool:
    return getattr(type(capability), method) is not getattr(Capability, method)


class Capabilities:
    """The capabilities of requests, called together."""

    def __init__(self, *entries: Capability) -> None:
        self.entries = entries
        self._spelling = tuple(one.spell for one in entries if _overrides(one, "spell"))
        self._expanding = tuple(one.expand for one in entries if _overrides(one, "expand"))
        self._waiting = tuple(one.waits for one in entries if _overrides(one, "waits"))
        self._overtaken = tuple(one.overtaken for one in entries if _overrides(one, "overtaken"))
        self._resources = tuple(one for one in entries if _overrides(one, "resource"))
        self._admitting = tuple(one for one in entries if _overrides(one, "admit"))
        self._keying = tuple(one.keying for one in entries if _overrides(one, "keying"))
        self._parts = tuple(one.part for one in entries if _overrides(one, "part"))

    def spelled(self, submission: Submission, front: Front) -> Submission:
        """Return the submission with its text as it is encoded. Raise the request's error."""
        for spell in self._spelling if submission.text is not None else ():
            submission = submission._replace(text=spell(submission, submission.text or "", front))
        return submission

    def expanded(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        """Return the token ids of the prompt with placeholder tokens expanded. Raise the request's error."""
        for expand in self._expanding:
            token_ids = expand(submission, token_ids, front)
        return token_ids

    def waits(self, submission: Submission, front: Front) -> bool:
        """True if a submission has to wait before it is admitted."""
        return any(waits(submission, front) for waits in self._waiting)

    def overtaken(self, submission: Submission, front: Front) -> bool:
        """True if controls go on while it waits."""
        return any(overtaken(submission, front) for overtaken in self._overtaken)

    async def resources(self, submission: Submission, front: Front) -> Resources:
        """Wait for the resources that `admit` needs, and return them by capability. Raise the request's error."""
        return {one: await one.resource(submission, front) for one in self._resources}

    def admit(
        self, submission: Submission, token_ids: IntArray, front: Front, resources: Resources = NO_RESOURCES
    ) -> Extensions:
        """Return the extensions of a request with this prompt. Raise `InvalidRequest` if one is unavailable."""
        admitted = [one.admit(submission, token_ids, front, resources.get(one)) for one in self._admitting]
        extensions = [extension for extension in admitted if extension is not None]
        return Extensions(*extensions) if extensions else NONE

    def keyed_request(self, prompt: KeyedPrompt, front: Front) -> Request:
        """Return a prompt as a request that says on what its pages depend, and no more. It is submitted nowhere.

        Raises `InvalidRequest` as its own request would.
        """
        keyed = [keying(prompt, front) for keying in self._keying]
        extensions = Extensions(*[extension for extension in keyed if extension is not None])
        return Request("", prompt.token_ids, prompt.sampling, extensions=extensions)

    def parts(self, request: Request, submission: Submission, front: Front) -> tuple[Part, ...]:
        """Return the parts of a sequence's output."""
        found = [part(request, submission, front) for part in self._parts]
        return tuple([part for part in found if part is not None])


def capabilities_of() -> Capabilities:
    """Return the capabilities of a session. Of several that refuse a request, the first one's error is told.

    Namespaces of cached pages have the digests of extensions in this order, too.
    """
    return Capabilities(
        EmbeddingIntake(),
        TokenIdIntake(),
        ProcessorIntake(),
        AdapterIntake(),
        PictureIntake(),
        TapIntake(),
        PriorityIntake(),
        ScoreIntake(),
        StructureIntake(),
        ReplyIntake(),
    )
