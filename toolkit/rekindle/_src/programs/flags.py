"""What rows want of a step, as bits: the host knows it from the options, so programs need no reductions to find out.

A row carries its own bits and a step the union of its rows': `lax.cond`s of the step program look at the union.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from rekindle._src.core.config import Sampling
from rekindle_kernels import SMALL_TOP_K


class Flag(enum.IntFlag):
    """Bits from FIRST_PROCESSOR up are the logits processors, in the order of the session's."""

    SAMPLES = 1  # the last position's logits choose a token
    DRAWS = 2  # temperature is above 0
    TOP_K = 4
    LARGE_K = 8  # beyond SMALL_TOP_K
    TOP_P = 16
    BIASED = 32
    PENALISED = 64
    BARRED = 128  # min_tokens is not reached
    LOGPROBS = 256
    PROMPT_LOGPROBS = 512
    KEPT = 1024  # its keys and values are in a shared page already and are not written again
    CHOOSES = 2048  # SAMPLES, or a draft's: its logits are needed


SHAPES = Flag.BIASED | Flag.PENALISED | Flag.BARRED
FIRST_PROCESSOR = 12  # bit
MOST_PROCESSORS = 16
PROCESSORS = ((1 << MOST_PROCESSORS) - 1) << FIRST_PROCESSOR


def flags_of(sampling: Sampling, processors: Mapping[str, int]) -> int:
    """The bits that stay the same for a request; `processors` maps names to their places in the session."""
    flags = Flag(0)
    if not sampling.greedy:
        flags |= Flag.DRAWS
        flags |= Flag.TOP_K * (sampling.top_k > 0)
        flags |= Flag.LARGE_K * (sampling.top_k > SMALL_TOP_K)
        flags |= Flag.TOP_P * (sampling.top_p < 1.0)
    flags |= Flag.BIASED * bool(sampling.logit_bias)
    flags |= Flag.PENALISED * sampling.penalised
    flags |= Flag.LOGPROBS * (sampling.logprobs is not None)
    flags |= Flag.PROMPT_LOGPROBS * (sampling.prompt_logprobs is not None)
    return int(flags) | sum(1 << (FIRST_PROCESSOR + processors[name]) for name in set(sampling.processors))
