"""The options of one request: its own, over those of its `Sampling` or of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.messages import Engine
from rekindle._src.structured.spec import Structure, structure_of
from rekindle.errors import InvalidRequest


def sampling_of(engine: Engine, sampling: Sampling | None, options: Mapping[str, Any]) -> Sampling:
    """The request's options. A `Sampling` is taken as it is; without one the checkpoint's defaults are below `options`.

    There None leaves an option at the checkpoint's value, as leaving it out does.
    """
    if sampling is not None or engine.sampling is None:
        return Sampling.of(sampling, options)
    return Sampling.of(engine.sampling, {name: value for name, value in options.items() if value is not None})


def structure_in(engine: Engine, sampling: Sampling) -> Structure | None:
    """What the options ask of the text's structure, checked as far as that is possible without compiling it."""
    structure = structure_of(sampling)
    if structure is not None and not engine.tokenizer.has_text:
        kind = structure.spec.kind
        raise InvalidRequest(kind, getattr(sampling, kind), "needs a tokenizer", "Open a model with tokenizer.json")
    return structure


def same_structure(one: Sampling, other: Sampling) -> bool:
    """Whether both ask for the same structure, so that a fork goes on in that of its source."""
    first, second = structure_of(one), structure_of(other)
    return first is not None and second is not None and first.spec == second.spec
