"""The grammars of requests that are taken in: compiled in worker threads, since one may take seconds."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from rekindle._src.core.guides import GuideLike
from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.messages import Engine, Submission
from rekindle._src.dispatch.structured_output import Structured
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.structured.grammar import Grammar
    from rekindle._src.structured.guide import Guide, Reasoning
    from rekindle._src.structured.spec import Spec
    from rekindle._src.structured.token_rules import TokenRules

COMPILE_SECONDS = 5.0
_NEAR = 8  # tokens at a prompt's end in which a template closes the reasoning that it turns off


def compiled(submission: Submission, engine: Engine) -> bool:
    """Whether a submission can be taken in without waiting for its grammar."""
    structure = submission.structure
    return structure is None or engine.grammars is None or engine.grammars.find(structure.spec) is not None


async def grammar_of(submission: Submission, engine: Engine) -> Grammar | None:
    """The compiled grammar of a submission. Raises `InvalidRequest` for one that can't be followed, or is too slow."""
    if submission.structure is None:
        return None
    spec: Spec = submission.structure.spec
    if engine.grammars is None:
        raise InvalidRequest(spec.kind, spec.text, "needs a model with a tokenizer", "Open one with tokenizer.json")
    found = engine.grammars.find(spec)
    if found is not None:
        return found
    with anyio.move_on_after(COMPILE_SECONDS):
        compile_it = functools.partial(engine.grammars.compile, spec, patience=COMPILE_SECONDS)
        return await anyio.to_thread.run_sync(compile_it, abandon_on_cancel=True)
    raise InvalidRequest(spec.kind, spec.text, f"took over {COMPILE_SECONDS:g} s to compile", "Use a smaller one")


def guide_of(
    grammar: Grammar | None,
    rules: TokenRules | None,
    submission: Submission,
    ids: IntArray,
    engine: Engine,
    eos: Collection[int],
) -> GuideLike | None:
    """A guide for one sequence, if its tokens are not free."""
    inner = None if grammar is None else _guide_of(grammar, submission, ids, engine, eos)
    if rules is None:
        return inner
    from rekindle._src.structured.token_rules import RestrictedGuide  # few requests need it

    return RestrictedGuide(rules, inner)


def _guide_of(grammar: Grammar, submission: Submission, ids: IntArray, engine: Engine, eos: Collection[int]) -> Guide:
    """A guide for one structured sequence. It goes on behind the part of the prompt that the grammar covers."""
    base = len(ids) - submission.covered
    guide = grammar.guide(eos, _reasoning(ids[:base].tolist(), engine, chat=submission.render is not None))
    for token in ids[base:].tolist():
        if guide.ended or guide.consume(token).problem:
            raise InvalidRequest(
                "edit",
                engine.tokenizer.decode(ids[base:].tolist()),
                f"does not follow the {grammar.spec.kind} of what is forked, or nothing may follow it",
                f"Change it, fork earlier, or pass {grammar.spec.kind}=None",
            )
    guide.consumed = 0
    return guide


def _reasoning(prompt: list[int], engine: Engine, *, chat: bool) -> Reasoning | None:
    """Whether the model thinks before its answer: the prompt ends amid it, or a chat's model may begin with it."""
    if engine.think_ids is None:
        return None
    from rekindle._src.structured.guide import Reasoning  # few requests need it

    opens, closes = engine.think_ids
    last = max((at for at, token in enumerate(prompt) if token in (opens, closes)), default=None)
    if last is not None and prompt[last] == opens:
        return Reasoning(opens, closes, inside=True)
    turned_off = last is not None and last >= len(prompt) - _NEAR
    return Reasoning(opens, closes) if chat and not turned_off else None


def covered_by(submission: Submission, ids: IntArray, engine: Engine) -> Structured | None:
    """What detokenize makes an object of: the part of the prompt that the structure covers, and the text."""
    if submission.structure is None:
        return None
    before = ids[len(ids) - submission.covered :].tolist()
    closes = (
        None if engine.think_ids is None else engine.tokenizer.decode(engine.think_ids[1:], skip_special_tokens=False)
    )
    return Structured(submission.structure, before, engine.tokenizer.decode, closes)
