"""Logits processors that a user writes: pure JAX functions that step programs compile in.

A processor sees the model's raw logits before every other option. A request names the processors it wants in
`Sampling.processors`; a step that carries such a row runs in the variant of its program that holds them all, each
applied to the rows that asked for it. Name, version and what can be seen of the function's code and values are part of
the key of stored programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from rekindle._src.core import html
from rekindle._src.programs.flags import FIRST_PROCESSOR, MOST_PROCESSORS
from rekindle._src.programs.function_hash import function_hash
from rekindle.errors import ConfigError


class LogitsContext(NamedTuple):
    """What a processor may look at beside the logits; N rows, V vocabulary."""

    position: Array  # int32 [N]: index in the sequence of the token to choose
    prompt_length: Array  # int32 [N]
    last_token: Array  # int32 [N]: the token before
    in_prompt: Array  # bool [N, V]
    generated: Array  # int32 [N, V]: how often each token was generated


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LogitsProcessor(html.Record):
    """`function(logits float32 [N, V], context) -> float32 [N, V]`, each row on its own; traced once per program.

    Rows that choose no token in a step may hold anything. Give it another `version` when something changes that its own
    code does not show, such as code that it imports.
    """

    function: Callable[[Array, LogitsContext], Array]
    name: str
    version: str = "1"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError("function", self.function, "is not callable", "Pass a pure JAX function")
        for field in ("name", "version"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise ConfigError(field, value, "must be a non-empty string", "Name it")

    @property
    def key(self) -> tuple[str, str, str]:
        """Processors with equal keys compile to equal programs."""
        return self.name, self.version, function_hash(self.function)


def check_processors(processors: Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """The session's processors; names must differ."""
    for processor in processors:
        if not isinstance(processor, LogitsProcessor):
            fix = "Pass rekindle.LogitsProcessor(function, name='…')"
            raise ConfigError("processors", processor, "is no LogitsProcessor", fix)
    names = [processor.name for processor in processors]
    if len(set(names)) < len(names):
        raise ConfigError("processors", names, "has a name twice", "Name every processor differently")
    if len(names) > MOST_PROCESSORS:
        raise ConfigError("processors", names, f"has more than {MOST_PROCESSORS}", "Join some into one")
    return tuple(processors)


def process(processors: Sequence[LogitsProcessor], logits: Array, flags: Array, context: LogitsContext) -> Array:
    """Logits [N, V] after each row's processors."""
    for index, processor in enumerate(processors):
        changed = processor.function(logits, context)
        if changed.shape != logits.shape:
            raise ConfigError(
                "processors", processor.name, f"gave {changed.shape} for logits {logits.shape}", "Keep the shape"
            )
        wanted = (flags >> (FIRST_PROCESSOR + index)) & 1 == 1
        logits = jnp.where(wanted[:, None], changed.astype(jnp.float32), logits)
    return logits
