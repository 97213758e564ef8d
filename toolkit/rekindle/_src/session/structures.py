"""The structure that a request's options ask for, checked as far as that is possible without the tokenizer's tables."""

from __future__ import annotations

from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.messages import Engine
from rekindle._src.structured.spec import Structure, structure_of
from rekindle.errors import InvalidRequest


def structure_for(engine: Engine, sampling: Sampling) -> Structure | None:
    """None if the text is free."""
    structure = structure_of(sampling)
    if structure is not None and not engine.tokenizer.has_text:
        kind = structure.spec.kind
        raise InvalidRequest(kind, getattr(sampling, kind), "needs a tokenizer", "Open a model with tokenizer.json")
    return structure
