"""Makes the handle of one prompt's request from the caller's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.messages import Engine
from rekindle._src.session.handle import Handle
from rekindle._src.session.prompts import PromptLike, parse_one
from rekindle._src.session.sampling_defaults import sampling_of
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Structure
    from rekindle._src.text.replies import ReplyPlan


def new_handle(
    session: object,
    host: Host,
    engine: Engine,
    prompt: PromptLike,
    sampling: Sampling | None,
    options: Mapping[str, Any],
    *,
    scoped: bool = False,
    base: Sampling | None = None,
    covered: int = 0,
    reply: ReplyPlan | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
) -> Handle[Any]:
    """Return a handle that is not submitted yet.

    In a fork the last `covered` tokens of the prompt belong to the structured text of the options `base`, which goes on
    if the request has the same structure. A fork of a chat has its `messages`, and its `reply` goes on.
    """
    merged = sampling_of(engine, sampling, options)
    host.check()
    parsed, structure = parse_one(prompt), structure_in(engine, merged)
    parsed = dataclasses.replace(parsed, reply=reply, messages=messages)
    if base is not None and same_structure(merged, base):
        parsed = dataclasses.replace(parsed, covered=covered)
    return Handle(host, session, parsed, merged, scoped=scoped, structure=structure)


def structure_in(engine: Engine, sampling: Sampling) -> Structure | None:
    """Return the structure that the options require of the text, checked as far as possible without compiling it."""
    if not sampling.structured:
        return None
    from rekindle._src.structured.spec import structure_of  # few requests need it

    structure = structure_of(sampling)
    if structure is not None and not engine.tokenizer.has_text:
        kind = structure.spec.kind
        raise InvalidRequest(kind, getattr(sampling, kind), "needs a tokenizer", "Open a model with tokenizer.json")
    return structure


def same_structure(left: Sampling, right: Sampling) -> bool:
    """True if both have the same structure, so that a fork continues that of its source."""
    from rekindle._src.structured.spec import structure_of

    first, second = structure_of(left), structure_of(right)
    return first is not None and second is not None and first.spec == second.spec
