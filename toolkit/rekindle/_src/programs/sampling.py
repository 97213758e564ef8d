"""Sampling on the device: the next token of each row, by the flags that the host sends with a step.

Axes: N rows, E hidden size, V vocabulary, L slots.

Before a token is chosen, logits are shaped. Order and meaning are as in vLLM and transformers. The bias is added.
The logit of a token in the prompt or output is divided by the repetition penalty where it is positive, and multiplied
where it is not. An output token loses the frequency penalty times its count, and the presence penalty once. Below
`min_tokens`, tokens that would end the request are masked. Each part is exact where it is unused (divide by 1, add 0),
so that rows with and without share one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import rekindle_kernels
from rekindle._src.core.records import Request, Row
from rekindle._src.programs.draft_rows import histories
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import Columns, RowFlag, RowOption
from rekindle._src.programs.step_part import StepInputs, StepPart
from rekindle_kernels import Choice, Wanted

NOT_FINITE = -1  # read by the host in place of the token of a row with numbers that are not finite
Choose = Callable[[Array, Array | None], Array]  # from logits [N, V] and masks [N, W] to tokens [N]
Take = Callable[[Array, Choose], Any]


def plainly(logits: Array, choose: Choose) -> Array:
    """Return tokens [N] of rows without masks."""
    return choose(logits, None)


def choose(
    logits: Array, choice: Choice, any_flags: Array, masks: Array | None = None, *, implementation: str | None = None
) -> Array:
    """Return tokens [N] for logits [N, V]; `masks` allow tokens, and rows with temperature 0 are greedy.

    `any_flags` is the union of the rows' flags.
    """
    options = Wanted(
        draws=any_flags & RowFlag.DRAWS != 0,
        top_k=any_flags & RowFlag.TOP_K != 0,
        large_k=any_flags & RowFlag.LARGE_K != 0,
        top_p=any_flags & RowFlag.TOP_P != 0,
    )
    return rekindle_kernels.draw(logits, choice, options, masks, implementation=implementation)


def marked(tokens: Array, hidden: Array, logits: Array) -> Array:
    """Return `tokens` [N] with `NOT_FINITE` where a row's hidden state [N, E] or logits [N, V] are not numbers.

    The residual stream carries a NaN or an infinity of any layer to the hidden state, and its sum shows it. A broken
    row of the head shows in the logit that was chosen, or makes the last token the one that is chosen: only then all
    logits are read again. Other steps pay for [N, E] alone.
    """
    with jax.named_scope("finite"):
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        finite = jnp.isfinite(hidden.astype(jnp.float32).sum(axis=-1) + chosen)
        finite &= lax.cond(
            jnp.any(tokens == logits.shape[-1] - 1),
            lambda: ~jnp.isnan(logits.max(axis=-1)),
            lambda: jnp.ones(tokens.shape, bool),
        )
        return jnp.where(finite, tokens, NOT_FINITE)


# An option is a Python float; beyond float32 a repetition penalty would be infinite, or 0, which is divided by.
LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


class Shaping(NamedTuple):
    """The options of each row; every field has N entries."""

    repetition: Array  # float32; 1 is off
    presence: Array  # float32; 0 is off
    frequency: Array  # float32; 0 is off
    biased: Array  # bool: the request has a logit_bias, which is in its slot
    barred: Array  # bool: below min_tokens, so that end tokens are masked


def shape(logits: Array, shaping: Shaping, state: RequestState, slots: Array, history: Array) -> Array:
    """Return shaped logits [N, V], by each row's `history` [N, V]. Row i reads bias and end ids of slot `slots[i]`."""
    rows = jnp.arange(logits.shape[0])[:, None]
    bias = jnp.where(shaping.biased[:, None], state.bias_values[slots], 0.0)
    logits = logits.at[rows, state.bias_ids[slots]].add(bias, mode="drop")

    times = (history >> 1).astype(jnp.float32)
    repetition = shaping.repetition[:, None]
    repeated = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    logits = jnp.where(history > 0, repeated, logits)
    logits = logits - shaping.frequency[:, None] * times - shaping.presence[:, None] * (times > 0.0)

    ends = jnp.where(shaping.barred[:, None], state.end_ids[slots], logits.shape[-1])
    return logits.at[rows, ends].set(-jnp.inf, mode="drop")


class ShapingOption(RowOption[Shaping]):
    """Bias, penalties and `min_tokens` of a row: three float columns, and the history in a request's slot."""

    option = "sampling.shaped"
    bits = int(RowFlag.BIASED | RowFlag.PENALISED | RowFlag.BARRED)
    history = int(RowFlag.PENALISED)
    neutral = 1.0, 0.0, 0.0
    repeats = True

    def flags(self, request: Request) -> int:
        sampling = request.sampling
        return int(RowFlag.BIASED) * bool(sampling.logit_bias) | int(RowFlag.PENALISED) * sampling.penalised

    def row_flags(self, request: Request) -> Callable[[Row], int] | None:
        least, barred = request.sampling.min_tokens, int(RowFlag.BARRED)
        return (lambda row: barred if row.generated < least else 0) if least else None

    def constants(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        sampling = request.sampling
        if not sampling.penalised:
            return (), self.neutral
        repetition = min(max(sampling.repetition_penalty, _SMALLEST), LARGEST)
        return (), (repetition, sampling.presence_penalty, sampling.frequency_penalty)

    def reads_slot(self, request: Request) -> bool:
        return True

    def unpack(self, columns: Columns) -> Shaping:
        repetition, presence, frequency = (columns.floats[:, column] for column in range(len(self.neutral)))
        flags = columns.flags
        return Shaping(repetition, presence, frequency, (flags & RowFlag.BIASED) != 0, (flags & RowFlag.BARRED) != 0)


class LogitShaping(StepPart[Shaping, tuple[()]]):
    """Changes logits by bias, penalties and `min_tokens`."""

    changing = ShapingOption.bits

    def change(self, logits: Array, inputs: StepInputs, own: Shaping, state: RequestState) -> Array:
        return shape(logits, own, state, inputs.slots, histories(state, inputs))
