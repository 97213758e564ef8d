"""The grammars of requests that are taken in: compiled elsewhere, since one may take seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

import anyio

from rekindle._src.core.guides import GuideLike
from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.mailbox import OneShot
from rekindle._src.dispatch.messages import Engine, Submission
from rekindle._src.dispatch.structured_output import Structured
from rekindle.errors import InvalidRequest, RequestAborted

if TYPE_CHECKING:
    from rekindle._src.structured.grammar import Grammar, Grammars
    from rekindle._src.structured.guide import Guide, Reasoning
    from rekindle._src.structured.spec import Spec
    from rekindle._src.structured.token_rules import TokenRules

PATIENCE = 10.0  # seconds that a request waits for its grammar to begin to compile
_LOOK_SECONDS = 0.25  # between two checks whether a waiting request was cancelled
_NEAR = 8  # tokens at a prompt's end in which a template closes the reasoning that it turns off


def compiled(submission: Submission, engine: Engine) -> bool:
    """True if a submission can be taken in without waiting for its grammar."""
    structure = submission.structure
    return structure is None or engine.grammars is None or engine.grammars.find(structure.spec) is not None


async def grammar_of(submission: Submission, engine: Engine) -> Grammar | None:
    """Return the compiled grammar of a submission. Raises as `compiled_grammar` does."""
    if submission.structure is None:
        return None
    spec: Spec = submission.structure.spec
    if engine.grammars is None:
        raise InvalidRequest(spec.kind, spec.text, "needs a model with a tokenizer", "Open one with tokenizer.json")
    mailbox = submission.mailbox
    caller = submission.caller or submission.sampling.salt or ""
    return await compiled_grammar(engine.grammars, spec, caller=caller, is_live=lambda: not mailbox.abandoned)


async def compiled_grammar(
    grammars: Grammars, spec: Spec, *, caller: str = "", is_live: Callable[[], bool] = lambda: True
) -> Grammar:
    """Return a compiled grammar, without a thread that waits for it.

    Raises `InvalidRequest` for one that can't be followed, `Busy` if others take all places, and `RequestAborted` once
    `is_live` returns False.
    """
    match = grammars.find(spec)
    if match is not None:
        return match
    reply: OneShot[Grammar] = OneShot()

    def on_done(future: Future[Grammar]) -> None:
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


def guide_of(
    grammar: Grammar | None,
    rules: TokenRules | None,
    submission: Submission,
    ids: IntArray,
    engine: Engine,
    eos: Collection[int],
) -> GuideLike | None:
    """Return a guide for one sequence; None if its tokens are free."""
    sampling = submission.sampling
    # A token that may not come, or only later, could be the one that ends the text.
    steered = rules is None and not (sampling.ignore_eos or sampling.min_tokens or sampling.processors)
    longest = engine.config.max_model_len
    assert longest is not None, "the config is resolved"
    budget = min(sampling.max_tokens, longest - len(ids)) if steered else None
    inner = None if grammar is None else _guide_of(grammar, submission, ids, engine, eos, budget)
    if rules is None:
        return inner
    from rekindle._src.structured.token_rules import RestrictedGuide  # few requests need it

    return RestrictedGuide(rules, inner)


def _guide_of(
    grammar: Grammar, submission: Submission, ids: IntArray, engine: Engine, eos: Collection[int], budget: int | None
) -> Guide:
    """Make a guide for one structured sequence of at most `budget` tokens.

    It goes on behind the part of the prompt that the grammar covers. Behind a part that is complete only an end token
    may come.
    """
    base = len(ids) - submission.covered
    reasoning = _reasoning(ids[:base].tolist(), engine, chat=submission.render is not None)
    guide = grammar.guide(eos, reasoning, budget)
    for token in ids[base:].tolist():
        if guide.consume(token).problem:
            raise InvalidRequest(
                "edit",
                engine.tokenizer.decode(ids[base:].tolist()),
                f"does not follow the {grammar.spec.kind} of what is forked, or nothing may follow it",
                f"Change it, fork earlier, or pass {grammar.spec.kind}=None",
            )
    guide.consumed, guide.ended = 0, False
    return guide


def _reasoning(prompt: list[int], engine: Engine, *, chat: bool) -> Reasoning | None:
    """Return the reasoning before the answer: the prompt ends within it, or a chat's reply may begin with it."""
    if engine.think_ids is None:
        return None
    from rekindle._src.structured.guide import Reasoning  # few requests need it

    opens, closes = engine.think_ids
    place = max((at for at, token in enumerate(prompt) if token in (opens, closes)), default=None)
    if place is not None and prompt[place] == opens:
        return Reasoning(opens, closes, inside=True)
    turned_off = place is not None and place >= len(prompt) - _NEAR
    return Reasoning(opens, closes) if chat and not turned_off else None


def covered_by(submission: Submission, ids: IntArray, engine: Engine) -> Structured | None:
    """Return the parser of a structured text, with the part of the prompt that the structure covers."""
    if submission.structure is None:
        return None
    before = ids[len(ids) - submission.covered :].tolist()
    closes = (
        None if engine.think_ids is None else engine.tokenizer.decode(engine.think_ids[1:], skip_special_tokens=False)
    )
    return Structured(submission.structure, before, engine.tokenizer.decode, closes)
