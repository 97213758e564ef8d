"""Structures as a capability of requests: grammars and token rules guide a text, which may describe an object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio

from rekindle._src.capabilities.guides.guidance import GUIDED, Guidance
from rekindle._src.capabilities.guides.remote import RemoteGuide, SentGuide
from rekindle._src.capabilities.replies.request import ChatReply, ReasoningBudget
from rekindle._src.core import words
from rekindle._src.core.extension import Extension
from rekindle._src.core.records import FinishReason, GuideLike, GuideReport, IntArray, NewGuide, Request, TokenEvent
from rekindle._src.core.reply import DeferredParse
from rekindle._src.dispatch.backend import Front, SessionService, Submission
from rekindle._src.dispatch.capability import Capability, Fields, Part, SequenceEnd
from rekindle._src.dispatch.threads import OneShot
from rekindle.errors import InvalidRequest, NotParsed, NotParsedReason, RequestAborted

if TYPE_CHECKING:
    from rekindle._src.structured.compilers import Job
    from rekindle._src.structured.reasoning import ReasoningRules, TokenTexts
    from rekindle._src.structured.spec import Spec, Structure

PATIENCE = 10.0  # seconds that a request waits for its grammar to begin to compile
_LOOK_SECONDS = 0.25  # between two checks whether a waiting request was cancelled
_NEAR = 8  # tokens at a prompt's end in which a template closes the reasoning that it turns off
_ENDING = 512  # tokens of a prompt that say how its reply begins
_SPACED = ("schema", "json")  # structures that whitespace may stand before


class GrammarLike(Protocol):
    """A structure that texts can follow: compiled, or in a fleet only described."""

    @property
    def spec(self) -> Spec: ...
    def guide(
        self, eos_ids: Collection[int], rules: ReasoningRules | None = None, budget: int | None = None
    ) -> NewGuide:
        """Return a guide for one sequence."""
        ...


class GrammarsLike(Protocol):
    """The grammars of a front; `find` knows all of them where nothing is compiled."""

    def find(self, spec: Spec) -> GrammarLike | None: ...
    def reasoning_guide(self, rules: ReasoningRules) -> NewGuide: ...
    def begin(self, spec: Spec, caller: str = "") -> Job[Any]: ...
    def leave(self, job: Job[Any]) -> None: ...
    def compile(self, spec: Spec, *, patience: float | None = None) -> GrammarLike: ...
    def close(self) -> None: ...


# Of models with texts.
GRAMMARS: SessionService[GrammarsLike] = SessionService("grammars", close=lambda grammars: grammars.close())
# Tokens around the reasoning of models that have them.
THINK_IDS: SessionService[tuple[int, int]] = SessionService("think ids")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StructuredText(Extension):
    """Of a submission: the structure of the text that its options ask for."""

    structure: Structure
    covered: int = 0  # tokens at the prompt's end that belong to it already, as in a fork
    calls: bool = False  # it is the grammar of calls that have to be made


class StructureIntake(Capability["GrammarLike | None"]):
    """A schema, an expression, a grammar or a list of choices, and tokens that may not come."""

    def waits(self, submission: Submission, front: Front) -> bool:
        """True if the grammar has to be compiled."""
        if SentGuide in submission.extensions:
            return True
        text, grammars = submission.extensions.get(StructuredText), GRAMMARS.of(front)
        return text is not None and grammars is not None and grammars.find(text.structure.spec) is None

    async def resource(self, submission: Submission, front: Front) -> GrammarLike | None:
        """Return the compiled grammar. Raises as `compiled_grammar` does."""
        text, sent = submission.extensions.get(StructuredText), submission.extensions.get(SentGuide)
        if text is None and sent is None:
            return None
        spec: Spec | None = text.structure.spec if text is not None else None if sent is None else sent.remote.spec
        grammars = GRAMMARS.of(front)
        if grammars is None:
            field, value = ("reasoning_budget", None) if spec is None else (spec.kind, spec.text)
            raise InvalidRequest(field, value, "needs a model with a tokenizer", "Open one with tokenizer.json")
        if spec is None:
            return None
        mailbox = submission.mailbox
        caller = submission.caller or submission.sampling.salt or ""
        return await compiled_grammar(grammars, spec, caller=caller, is_live=lambda: not mailbox.abandoned)

    def admit(
        self, submission: Submission, token_ids: IntArray, front: Front, resource: GrammarLike | None
    ) -> Guidance | None:
        sampling, given = submission.sampling, submission.extensions.get(Guidance)
        if (sent := submission.extensions.get(SentGuide)) is not None:
            given, resource = Guidance(_built(sent.remote, resource, front)), None
        budget = submission.extensions.get(ReasoningBudget)
        if resource is None and budget is None and not sampling.restricted:
            return given
        rules = None
        if sampling.restricted:
            from rekindle._src.structured.token_rules import rules_of  # few requests need it

            rules = rules_of(sampling, front.tokenizer, front.vocab_size)
        guide = None if given is None else given.guide
        if resource is not None:
            # A token that may not come, or only later, could be the one that ends the text.
            steered = rules is None and not (sampling.ignore_eos or sampling.min_tokens or sampling.processors)
            guide = _guide_of(resource, submission, token_ids, front, steered=steered)
        elif budget is not None and given is None:
            of_reply = reasoning_rules(submission, token_ids, front)
            assert of_reply is not None, "a chat has checked that its family marks reasoning"
            grammars = GRAMMARS.of(front)
            assert grammars is not None, "a chat has a tokenizer"
            if of_reply.inside or of_reply.opens:  # the prompt may say that there is no reasoning
                guide = grammars.reasoning_guide(of_reply)
        if rules is not None:
            from rekindle._src.structured.token_rules import RestrictedGuide

            guide = RestrictedGuide(rules, guide)
        return None if guide is None else Guidance(guide)

    def slow(self, submission: Submission) -> bool:
        return SentGuide in submission.extensions or submission.sampling.restricted

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        if Guidance not in request.extensions:
            return None
        text = submission.extensions.get(StructuredText)
        return GuideOutput(None if text is None else _structured(text, request, submission, front))


async def compiled_grammar(
    grammars: GrammarsLike, spec: Spec, *, caller: str = "", is_live: Callable[[], bool] = lambda: True
) -> GrammarLike:
    """Return a compiled grammar, without a thread that waits for it.

    Raises `InvalidRequest` for one that can't be followed, `Busy` if others take all places, and `RequestAborted` once
    `is_live` returns False.
    """
    match = grammars.find(spec)
    if match is not None:
        return match
    reply: OneShot[GrammarLike] = OneShot()

    def on_done(future: Future[GrammarLike]) -> None:
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            reply.put(future.result())
        else:
            reply.fail(error)

    job = grammars.begin(spec, caller)
    try:
        job.future.add_done_callback(on_done)
        patience = anyio.current_time() + PATIENCE
        while True:
            with anyio.move_on_after(_LOOK_SECONDS):
                return await reply.get()
            if not is_live():
                raise RequestAborted("the request was cancelled before it was queued")
            if not job.started and anyio.current_time() > patience:
                from rekindle._src.structured.grammar import wait_error

                raise wait_error(PATIENCE)
    finally:
        grammars.leave(job)


def _guide_of(grammar: GrammarLike, submission: Submission, ids: IntArray, front: Front, *, steered: bool) -> GuideLike:
    """Make a guide for one structured sequence. If it is `steered`, it ends in time.

    It goes on after the part of the prompt that the grammar covers. If that part is complete, only an end token may
    follow.
    """
    sampling, longest = submission.sampling, front.config.max_model_len
    budget = min(sampling.max_tokens, longest - len(ids)) if steered else None
    text = submission.extensions.get(StructuredText)
    base = len(ids) - (0 if text is None else text.covered)
    guide = grammar.guide(front.eos_ids(sampling), reasoning_rules(submission, ids, front), budget)
    return _after(guide, ids[base:].tolist(), grammar.spec.kind, front.tokenizer.decode)


def _built(remote: RemoteGuide, grammar: GrammarLike | None, front: Front) -> NewGuide:
    """Return the guide of a description, after its covered tokens. Raise `InvalidRequest` if they don't match."""
    if grammar is None:
        grammars = GRAMMARS.of(front)
        assert grammars is not None, "`resource` has asked for them"
        assert remote.rules is not None, "it guides something"
        return grammars.reasoning_guide(remote.rules)
    guide = grammar.guide(remote.eos_ids, remote.rules, remote.budget)
    return _after(guide, remote.covered, grammar.spec.kind, list)


def _after(guide: NewGuide, covered: list[int], kind: str, shown: Callable[[list[int]], object]) -> NewGuide:
    """Return a new guide advanced past the `covered` tokens of its prompt; see `GrammarLike.guide`.

    Raises `InvalidRequest`, with the `kind` of structure and the `shown` tokens, if they don't follow the structure. If
    they complete it, the end may come.
    """
    for token in covered:
        if guide.consume(token).problem:
            problem = f"does not follow the {kind} of what is forked, or nothing may follow it"
            fix = f"Change it, fork earlier, or pass {kind}=None"
            raise InvalidRequest("edit", shown(covered), problem, fix)
    guide.consumed, guide.ended = 0, False
    return guide


def reasoning_rules(submission: Submission, ids: IntArray, front: Front) -> ReasoningRules | None:
    """Return the reasoning before the answer: the prompt ends within it, or a chat's reply may begin with it.

    Tokens of the prompt that a structured text covers already are not part of the prompt.
    """
    from rekindle._src.structured.reasoning import ReasoningRules, TokenTexts  # few requests need them

    extensions, texts = submission.extensions, TokenTexts(front.tokenizer)
    text, reply, budget = extensions.get(StructuredText), extensions.get(ChatReply), extensions.get(ReasoningBudget)
    before = ids[: len(ids) - (0 if text is None else text.covered)].tolist()
    ending = front.tokenizer.decode(before[-_ENDING:], skip_special_tokens=False)
    if reply is not None and reply.plan.format.thoughts is not None:
        plan = reply.plan if len(before) == len(ids) else dataclasses.replace(reply.plan, continued=None)
        calls, spaced = text is not None and text.calls, text is not None and text.structure.spec.kind in _SPACED
        most = None if budget is None else (budget.tokens, budget.message)
        return ReasoningRules.of(plan, ending, most, calls=calls, spaced=spaced, free=text is None).after(before, texts)
    think_ids = THINK_IDS.of(front)
    if think_ids is None:
        return None
    opens, closes = think_ids
    place = max((at for at, token in enumerate(before) if token in (opens, closes)), default=None)
    inside = place is not None and before[place] == opens
    turned_off = place is not None and place >= len(before) - _NEAR
    if inside or (submission.render is not None and not turned_off):
        return ReasoningRules(texts.text_of(opens), (texts.text_of(closes),), inside=inside)
    return None


def _structured(text: StructuredText, request: Request, submission: Submission, front: Front) -> TextStructure:
    """Return the parser of a structured text, with the part of the prompt that the structure covers."""
    ids = request.token_ids
    before = ids[len(ids) - text.covered :].tolist()
    from rekindle._src.structured.reasoning import TokenTexts

    rules = reasoning_rules(submission, ids, front)
    return TextStructure(text.structure, before, front.tokenizer.decode, TokenTexts(front.tokenizer), rules)


class GuideOutput(Part[None]):
    """The reports of a sequence's guide, and the object that its text describes if it has a structure."""

    __slots__ = ("_guided", "_structured")

    def __init__(self, structured: TextStructure | None) -> None:
        self._structured = structured
        self._guided: list[GuideReport] = []  # one for each token

    def take(self, event: TokenEvent) -> None:
        self._guided += GUIDED.of(event)

    def cut(self, count: int) -> None:
        del self._guided[count:]

    def completion(self, end: SequenceEnd) -> Fields:
        forced, structured = tuple(guided.forced for guided in self._guided), self._structured
        if structured is None:
            return {"forced": forced}
        parsing = structured.parsing(end.text, end.tokens, self._guided, end.reason)
        return {"forced": forced, "covered": len(structured.before), "parsing": parsing}


class TextStructure(NamedTuple):
    """The structure of a request's text, and the parts that its object is made from."""

    structure: Structure
    before: Sequence[int]  # tokens of the prompt that the structure covers already, as in a fork
    decode: Callable[[Sequence[int]], str]
    texts: TokenTexts
    rules: ReasoningRules | None = None  # of the reasoning before it

    def parsing(
        self, text: str, tokens: Sequence[int], guided: Sequence[GuideReport], reason: FinishReason
    ) -> DeferredParse:
        """Return the object of a sequence's `text` and `tokens`, which ended for `reason`."""
        whole, start, rest = [*self.before, *tokens], 0, ""
        if self.rules is not None:
            start, rest = self.rules.answer_in(whole, self.texts)
        if self.before or start:
            text = rest + self.decode(whole[start:])
        return DeferredParse(text, self.structure.parse, _cut(guided, reason))


def _cut(guided: Sequence[GuideReport], reason: FinishReason) -> NotParsed | None:
    """Return why a text is not whole; None if it is.

    A text that a bound cut is whole only if nothing could follow: 46 may be the beginning of 4600.
    """
    if reason in (FinishReason.EOS, FinishReason.GRAMMAR):
        return None
    if reason.cut:
        if guided and guided[-1].ended:
            return None
        option: NotParsedReason = "max_tokens" if reason is FinishReason.LENGTH else "max_model_len"
        return NotParsed(option, f"{option} cut the text after {words.count(len(guided), 'token')}")
    if reason is FinishReason.STOP:
        return NotParsed("stop", "a stop string or a stop token ended the text")
    return NotParsed("ended", f"the request was {reason}")
