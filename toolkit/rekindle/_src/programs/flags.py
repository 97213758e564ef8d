"""Flags: the options that rows need of a step, as bits.

The host knows them from the options, so that programs need no reductions to derive them. A row carries its own bits and
a step the union of its rows', which the conditions of the step program read.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeVar

from jax import Array, lax

from rekindle._src.core.sampling import Sampling
from rekindle_kernels import SMALL_TOP_K

T = TypeVar("T")


class Flag(enum.IntFlag):
    """The flags of a row. Bits from FIRST_PROCESSOR up are the session's logits processors, in their order."""

    SAMPLES = 1  # the last position's logits choose a token
    DRAWS = 2  # temperature is above 0
    TOP_K = 4
    LARGE_K = 8  # top_k is above SMALL_TOP_K
    TOP_P = 16
    BIASED = 32
    PENALISED = 64
    BARRED = 128  # min_tokens is not reached: end tokens are masked
    LOGPROBS = 256
    PROMPT_LOGPROBS = 512
    KEPT = 1024  # the row's keys and values are in a shared page already and are not written again
    CHOOSES = 2048  # the row's logits are needed: it samples, or it is a draft
    SAMPLED_LOGPROBS = 1 << 28  # behind the processors' bits


FIRST_PROCESSOR = 12  # bit
MAX_PROCESSORS = 16
GREEDY = Flag.SAMPLES | Flag.KEPT | Flag.CHOOSES  # all the flags of steps of greedy rows without further options
PROCESSORS = ((1 << MAX_PROCESSORS) - 1) << FIRST_PROCESSOR


def drawing_flags(sampling: Sampling) -> int:
    """Return the bits of the options by which a token is drawn."""
    flags = Flag(0)
    if not sampling.greedy:
        flags |= Flag.DRAWS
        flags |= Flag.TOP_K * (sampling.top_k > 0)
        flags |= Flag.LARGE_K * (sampling.top_k > SMALL_TOP_K)
        flags |= Flag.TOP_P * (sampling.top_p < 1.0)
    return int(flags)


def branch(condition: Array | bool, yes: Callable[[], T], no: Callable[[], T]) -> T:
    """Run `lax.cond`, or just one of the branches where the condition is known while the program is traced."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    result: T = lax.cond(condition, yes, no)
    return result
