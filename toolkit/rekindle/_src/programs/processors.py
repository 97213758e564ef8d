"""Logits processors: pure JAX functions of the user that are compiled into step programs.

A processor sees the model's raw logits, before every other option. A request names its processors in
`Sampling.processors`; a step with such a row runs in the variant of its program that contains all of the session's
processors, each applied to the rows that name it. Name, version and a hash of the function's code and values are part
of the key of stored programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rekindle._src.core import html
from rekindle._src.core.records import Request, StepPlan
from rekindle._src.programs.buckets import PROCESSED
from rekindle._src.programs.feature import Feature, StepInputs
from rekindle._src.programs.flags import FIRST_PROCESSOR, MAX_PROCESSORS, PROCESSORS, branch
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.user_functions import check_all, check_function, function_hash, problem_of
from rekindle.errors import ConfigError


class LogitsContext(NamedTuple):
    """The arrays that a processor may read beside the logits; N rows, V vocabulary."""

    position: Array  # int32 [N]: index, in the sequence, of the token to choose
    prompt_length: Array  # int32 [N]
    last_token: Array  # int32 [N]: the token before that one
    in_prompt: Array  # bool [N, V]
    generated: Array  # int32 [N, V]: the number of times that each token was generated so far


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LogitsProcessor(html.Record):
    """A `function(logits float32 [N, V], context) -> float32 [N, V]` of independent rows; traced once per program.

    Rows that choose no token in a step may have any values. Change `version` when something changes that is not visible
    in the function's own code, such as code that it imports.
    """

    function: Callable[[Array, LogitsContext], Array]
    name: str
    version: str = "1"

    def __post_init__(self) -> None:
        check_function(self.function, self.name, self.version)

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of compiled programs: processors with equal keys compile to equal programs."""
        return self.name, self.version, function_hash(self.function)


def check_processors(processors: Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Check and return the session's processors. Raise ConfigError for a wrong type, equal names, or too many."""
    check_all("processors", processors, LogitsProcessor, MAX_PROCESSORS)
    return tuple(processors)


def check_results(processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
    """Raise ConfigError for a processor that fails for logits of this vocabulary, or changes their shape."""
    rows = 2
    numbers: Any
    table: Any
    numbers, table = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, vocab_size), jnp.int32)
    logits = jax.ShapeDtypeStruct(table.shape, jnp.float32)
    in_prompt: Any = jax.ShapeDtypeStruct(table.shape, jnp.bool_)
    context = LogitsContext(numbers, numbers, numbers, in_prompt, table)
    for processor in processors:
        fix = "Use jax.numpy, and return logits of the shape that it was given"
        try:
            result = jax.eval_shape(processor.function, logits, context)
        except Exception as error:  # code of the user's
            problem = problem_of(processor.function, error, f"for logits {logits.shape}")
            raise ConfigError("processors", processor.name, problem, fix) from None  # the chain is JAX's
        _check_shape(processor, getattr(result, "shape", None), logits.shape)


def _check_shape(processor: LogitsProcessor, shape: tuple[int, ...] | None, expected: tuple[int, ...]) -> None:
    if shape != expected:
        returned = "no array" if shape is None else f"shape {shape}"
        problem = f"returned {returned} for logits of shape {expected}"
        raise ConfigError("processors", processor.name, problem, "Return one number for each token: the same shape")


def process(processors: Sequence[LogitsProcessor], logits: Array, flags: Array, context: LogitsContext) -> Array:
    """Apply to each row of the logits [N, V] the processors that its flags name."""
    for index, processor in enumerate(processors):
        changed = processor.function(logits, context)
        _check_shape(processor, changed.shape, logits.shape)
        selected = (flags >> (FIRST_PROCESSOR + index)) & 1 == 1
        logits = jnp.where(selected[:, None], changed.astype(jnp.float32), logits)
    return logits


class Processors(Feature):
    """The session's processors: a flag for each, in the programs of a variant that is compiled ahead."""

    changing, variant, warmed = PROCESSORS, PROCESSED, True

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = tuple(processors)
        self._bits = {processor.name: 1 << FIRST_PROCESSOR + index for index, processor in enumerate(processors)}

    def flags(self, request: Request) -> int:
        return sum(self._bits[name] for name in set(request.sampling.processors))

    def reads_slot(self, request: Request) -> bool:
        return bool(request.sampling.processors)

    def in_plan(self, plan: StepPlan) -> bool:
        return any(row.request.sampling.processors for row in plan.rows)

    def change(self, logits: Array, inputs: StepInputs, own: Any, state: RequestState) -> Array:
        history = state.history[inputs.slots]
        context = LogitsContext(
            position=inputs.lengths,
            prompt_length=inputs.prompt_lengths[inputs.last],
            last_token=inputs.tokens[inputs.last],
            in_prompt=(history & 1) == 1,
            generated=history >> 1,
        )
        return branch(
            inputs.any_flags & PROCESSORS != 0,
            lambda: process(self._processors, logits, inputs.flags, context),
            lambda: logits,
        )
