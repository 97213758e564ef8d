"""The fused step program: two buffers and the state on the device in; new pages, new state and one packed result out.

Axes: R decode rows, S prefill sequences, N = R + S rows that may sample, T prefill tokens, V vocabulary.

One call runs the model over [decode rows] + [prefill tokens], computes logits of the N last tokens only, samples, and
records each sampled token in its slot, where the next step reads it. Features that few requests use are inside
`lax.cond`s with small results: a branch that returned logits would copy [N, V] even when it is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.models.base import Graph, merge
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.finite import marked
from rekindle._src.programs.flags import PROCESSORS, SHAPES, Flag
from rekindle._src.programs.logit_shaping import shape
from rekindle._src.programs.logprobs import prompt_logprobs, row_logprobs
from rekindle._src.programs.packing import Layout, StepInputs, unpack
from rekindle._src.programs.pooling import pooled_states
from rekindle._src.programs.processors import LogitsContext, LogitsProcessor, process
from rekindle._src.programs.request_state import RequestState, record
from rekindle._src.programs.sampling import choose
from rekindle_kernels import greedy

Leaves = Sequence[Array]


class StepOutput(NamedTuple):
    """The results that the host reads."""

    rows: Array  # int32 [N, 1 + logprobs.WIDTH]: the token or NOT_FINITE, packed log-probabilities (or zeros)
    prompt: Array  # int32 [T, logprobs.WIDTH]: read only when a row asked for prompt_logprobs
    pooled: Array | None = None  # float32 [2, S, E] in a pooling program: sums and last states of each prefill chunk


Step = Callable[[Leaves, paged.KV, RequestState, Array, Array], tuple[paged.KV, RequestState, StepOutput]]


def make_step(
    graph: Graph,
    layout: Layout,
    page_size: int,
    *,
    implementation: str | None = None,
    processors: Sequence[LogitsProcessor] = (),
    pools: bool = False,
) -> Step:
    """The step of one layout as a pure function; the caller donates pages and state."""

    def step(
        leaves: Leaves, kv: paged.KV, state: RequestState, ints: Array, floats: Array
    ) -> tuple[paged.KV, RequestState, StepOutput]:
        model = merge(graph, leaves)
        inputs = unpack(layout, page_size, ints, floats, state.last_token)
        fixed = graph.precision.deterministic
        attend = paged.PagedAttention(model.config, kv, inputs, layout.rows, implementation, deterministic=fixed)
        hidden = model(
            inputs.tokens,
            inputs.positions,
            attend,
            lengths=jnp.maximum(inputs.prompt_lengths, inputs.positions + 1),
        )
        numbers = lax.iota(jnp.int32, layout.sequences) + 1
        needed = jnp.max(numbers, initial=0, where=inputs.flag(Flag.CHOOSES))  # 0 where no row samples
        last = hidden[inputs.last]
        logits = model.logits(last, needed)
        with jax.named_scope("sample"):
            tokens = _sample(logits, inputs, state, processors, implementation=graph.precision.implementation)
        told = marked(tokens, last, logits)
        logprobs = row_logprobs(inputs.wanted, logits, tokens)
        slots = jnp.where(inputs.flag(Flag.SAMPLES), inputs.slots, layout.slots)
        output = StepOutput(
            jnp.concatenate([told[:, None], logprobs], axis=1),
            prompt_logprobs(inputs.wanted, hidden, inputs.targets, model.logits),
            pooled_states(hidden[layout.rows :], inputs.cu_lengths) if pools else None,
        )
        return tuple(attend.kv), record(state, slots, tokens), output

    return step


def _sample(
    logits: Array,
    inputs: StepInputs,
    state: RequestState,
    processors: Sequence[LogitsProcessor],
    *,
    implementation: str | None,
) -> Array:
    changes, processed = inputs.wanted & (SHAPES | PROCESSORS) != 0, inputs.wanted & PROCESSORS != 0

    def change() -> Array:
        changed = logits
        if processors:
            context = _context(inputs, state)
            changed = lax.cond(processed, lambda: process(processors, logits, inputs.flags, context), lambda: logits)
        return shape(changed, inputs.shaping, state, inputs.slots)

    def options() -> Array:
        changed = lax.cond(changes, change, lambda: logits)
        return choose(changed, inputs.choice, inputs.wanted, implementation=implementation)

    plain = inputs.wanted & (SHAPES | PROCESSORS | Flag.DRAWS) == 0
    return lax.cond(plain, lambda: greedy(logits, implementation=implementation), options)


def _context(inputs: StepInputs, state: RequestState) -> LogitsContext:
    history = state.history[inputs.slots]
    return LogitsContext(
        position=inputs.lengths,
        prompt_length=inputs.prompt_lengths[inputs.last],
        last_token=inputs.tokens[inputs.last],
        in_prompt=(history & 1) == 1,
        generated=history >> 1,
    )
