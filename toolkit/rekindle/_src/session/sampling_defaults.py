"""The options of one request: its own, over those of its `Sampling` or of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.messages import Engine


def sampling_of(engine: Engine, sampling: Sampling | None, options: Mapping[str, Any]) -> Sampling:
    """Return the request's options. Without a `Sampling`, they default to those of the checkpoint.

    In that case None leaves an option at the checkpoint's value, as leaving it out does.
    """
    if sampling is not None or engine.sampling is None:
        return Sampling.of(sampling, options)
    return Sampling.of(engine.sampling, {name: value for name, value in options.items() if value is not None})
