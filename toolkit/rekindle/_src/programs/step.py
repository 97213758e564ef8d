"""The step program: two buffers and the state on the device in; new pages, new state and one packed result out.

Axes: R decode rows, S prefill sequences, N = R + S rows that may sample, T prefill tokens, V vocabulary.

One call runs the model over [decode rows] + [prefill tokens], computes logits of the N last tokens only, samples, and
records each sampled token in its slot, where the next step reads it. Features that few requests use are inside
`lax.cond`s with small results: a branch that returned logits would copy [N, V] even when it is not taken.

The tokens that a guide allows are known once the tokens of the step before have been read. The model of a step with
guided rows runs meanwhile. `make_gated` is such a step as one program, which waits for its masks after the model.
Where no program can wait, the step runs as two, `make_forward` and `make_choice`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.models.base import Graph, Model, merge
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.finite import marked
from rekindle._src.programs.flags import PROCESSORS, SHAPES, Flag, branch
from rekindle._src.programs.logit_shaping import shape
from rekindle._src.programs.logprobs import prompt_logprobs, row_logprobs
from rekindle._src.programs.packing import Layout, StepInputs, unpack
from rekindle._src.programs.page_tables import changed, with_changes
from rekindle._src.programs.pooling import pooled_states
from rekindle._src.programs.processors import LogitsContext, LogitsProcessor, process
from rekindle._src.programs.request_state import RequestState, record
from rekindle._src.programs.sampling import choose
from rekindle._src.programs.token_masks import Take, among, plainly, with_dead_ends
from rekindle_kernels import draws_in_one_call, gated_masks, greedy

Leaves = Sequence[Array]


class Scores(NamedTuple):
    """The results of a forward program for the choice."""

    logits: Array  # float32 [N, V]
    last: Array  # hidden states of the N last tokens


class StepOutput(NamedTuple):
    """The results that the host reads."""

    rows: Array  # int32 [N, 1 + logprobs.WIDTH]: the token or NOT_FINITE, packed log-probabilities (or zeros)
    prompt: Array  # int32 [T, logprobs.WIDTH]: read only if a row has prompt_logprobs
    pooled: Array | None = None  # float32 [2, S, E] in a pooling program: sums and last states of each prefill chunk


Step = Callable[[Leaves, paged.KV, RequestState, Array, Array], tuple[paged.KV, RequestState, StepOutput]]
Forward = Callable[..., tuple[Any, ...]]
Choice = Callable[[RequestState, Scores, Array, Array, Array], tuple[RequestState, Array]]
Gated = Callable[[Leaves, paged.KV, RequestState, Array, Array, Array], tuple[paged.KV, RequestState, StepOutput]]


def make_step(
    graph: Graph,
    layout: Layout,
    page_size: int,
    *,
    implementation: str | None = None,
    processors: Sequence[LogitsProcessor] = (),
    pools: bool = False,
) -> Step:
    """Return the step of one layout as a pure function. The caller donates pages and state."""

    def step(
        leaves: Leaves, kv: paged.KV, state: RequestState, ints: Array, floats: Array
    ) -> tuple[paged.KV, RequestState, StepOutput]:
        state = with_changes(layout, ints, state)
        inputs = unpack(layout, page_size, ints, floats, state.last_token, state.tables)
        model, new_kv, hidden = _compute(graph, leaves, kv, layout, inputs, implementation)
        new_state, output = finish(graph, layout, model, hidden, inputs, state, processors=processors, pools=pools)
        return new_kv, new_state, output

    return step


def make_forward(
    graph: Graph, layout: Layout, page_size: int, *, implementation: str | None = None, pools: bool = False
) -> Forward:
    """Return the first half of a guided step: everything but the choice of tokens. The caller donates pages.

    Page tables that stay on the device are an operand and the last result; the caller donates them, too.
    """

    def forward(
        leaves: Leaves, kv: paged.KV, last_token: Array, ints: Array, floats: Array, tables: Array | None = None
    ) -> tuple[Any, ...]:
        tables = changed(layout, ints, tables)
        inputs = unpack(layout, page_size, ints, floats, last_token, tables)
        model, new_kv, hidden = _compute(graph, leaves, kv, layout, inputs, implementation)
        results = finish_forward(layout, model, hidden, inputs, pools=pools)
        return new_kv, *results, *(() if tables is None else (tables,))

    return forward


def make_choice(
    layout: Layout, page_size: int, *, implementation: str | None = None, processors: Sequence[LogitsProcessor] = ()
) -> Choice:
    """Return the second half: the tokens of each row, among those in its mask [N, W]. The caller donates the state."""

    def choice(
        state: RequestState, scores: Scores, ints: Array, floats: Array, masks: Array
    ) -> tuple[RequestState, Array]:
        inputs = unpack(layout, page_size, ints, floats, state.last_token, state.tables)
        return _choose(layout, inputs, state, scores, masks, processors, implementation)

    return choice


def make_gated(
    graph: Graph,
    layout: Layout,
    page_size: int,
    *,
    implementation: str | None = None,
    processors: Sequence[LogitsProcessor] = (),
    pools: bool = False,
) -> Gated:
    """Return both halves in one program, which waits after the model for the masks of the `MaskGate` at `gate`.

    The caller donates pages and state.
    """

    def gated(
        leaves: Leaves, kv: paged.KV, state: RequestState, ints: Array, floats: Array, gate: Array
    ) -> tuple[paged.KV, RequestState, StepOutput]:
        state = with_changes(layout, ints, state)
        inputs = unpack(layout, page_size, ints, floats, state.last_token, state.tables)
        model, new_kv, hidden = _compute(graph, leaves, kv, layout, inputs, implementation)
        scores, prompt, pooled = finish_forward(layout, model, hidden, inputs, pools=pools)
        masks = gated_masks(gate, scores.logits)
        new_state, rows = _choose(layout, inputs, state, scores, masks, processors, graph.precision.implementation)
        return new_kv, new_state, StepOutput(rows, prompt, pooled)

    return gated


def _compute(
    graph: Graph, leaves: Leaves, kv: paged.KV, layout: Layout, inputs: StepInputs, implementation: str | None
) -> tuple[Model, paged.KV, Array]:
    model = merge(graph, leaves)
    fixed = graph.precision.deterministic
    attend = paged.PagedAttention(model.config, kv, inputs.paging, layout.rows, implementation, deterministic=fixed)
    hidden = model(inputs.tokens, inputs.positions, attend, lengths=inputs.rope_lengths)
    return model, tuple(attend.kv), hidden


def finish(
    graph: Graph,
    layout: Layout,
    model: Model,
    hidden: Array,
    inputs: StepInputs,
    state: RequestState,
    *,
    processors: Sequence[LogitsProcessor],
    pools: bool,
) -> tuple[RequestState, StepOutput]:
    """Compute a step's results from the hidden states [R + T, E] of its tokens."""
    scores = _scores(layout, model, hidden, inputs)
    with jax.named_scope("sample"):
        tokens = _sample(scores.logits, inputs, state, processors, implementation=graph.precision.implementation)
    marked_tokens = marked(tokens, scores.last, scores.logits)
    new_state, rows = _record(layout, inputs, state, scores, tokens, marked_tokens)
    prompt = prompt_logprobs(inputs.features, hidden, inputs.targets, model.logits)
    pooled = pooled_states(hidden[layout.rows :], inputs.cu_lengths) if pools else None
    return new_state, StepOutput(rows, prompt, pooled)


def finish_forward(
    layout: Layout, model: Model, hidden: Array, inputs: StepInputs, *, pools: bool
) -> tuple[Scores, Array, Array | None]:
    """Compute the results of a guided step's first half from the hidden states."""
    scores = _scores(layout, model, hidden, inputs)
    pooled = pooled_states(hidden[layout.rows :], inputs.cu_lengths) if pools else None
    return scores, prompt_logprobs(inputs.features, hidden, inputs.targets, model.logits), pooled


def _scores(layout: Layout, model: Model, hidden: Array, inputs: StepInputs) -> Scores:
    numbers = lax.iota(jnp.int32, layout.sequences) + 1
    needed = jnp.max(numbers, initial=0, where=inputs.flag(Flag.CHOOSES))  # 0 where no row samples
    last = hidden[inputs.last]
    logits = model.logits(last, needed)
    return Scores(logits, last)


def _choose(
    layout: Layout,
    inputs: StepInputs,
    state: RequestState,
    scores: Scores,
    masks: Array,
    processors: Sequence[LogitsProcessor],
    implementation: str | None,
) -> tuple[RequestState, Array]:
    """Choose tokens by the scores, among those in the masks [N, W], and record them."""
    with jax.named_scope("sample"):
        tokens, values = _sample(scores.logits, inputs, state, processors, among(masks), implementation=implementation)
    marked_tokens = with_dead_ends(marked(tokens, scores.last, scores.logits), masks, values)
    return _record(layout, inputs, state, scores, tokens, marked_tokens)


def _record(
    layout: Layout, inputs: StepInputs, state: RequestState, scores: Scores, tokens: Array, marked_tokens: Array
) -> tuple[RequestState, Array]:
    """Return the state with the rows' tokens recorded, and the rows' results for the host."""
    logprobs = row_logprobs(inputs.features, scores.logits, tokens)
    slots = jnp.where(inputs.flag(Flag.SAMPLES), inputs.slots, layout.slots)
    return record(state, slots, tokens), jnp.concatenate([marked_tokens[:, None], logprobs], axis=1)


def _sample(
    logits: Array,
    inputs: StepInputs,
    state: RequestState,
    processors: Sequence[LogitsProcessor],
    take: Take = plainly,
    *,
    implementation: str | None,
) -> Any:
    """Return tokens [N], or the result of `take` for shaped logits and the function that chooses among them."""
    changes, processed = inputs.features & (SHAPES | PROCESSORS) != 0, inputs.features & PROCESSORS != 0

    def change() -> Array:
        changed = logits
        if processors:
            context = _context(inputs, state)
            changed = branch(processed, lambda: process(processors, logits, inputs.flags, context), lambda: logits)
        return shape(changed, inputs.shaping, state, inputs.slots)

    def drawn(shaped: Array, masks: Array | None) -> Array:
        return choose(shaped, inputs.choice, inputs.features, masks, implementation=implementation)

    def options() -> Any:
        return take(branch(changes, change, lambda: logits), drawn)

    if take is not plainly and draws_in_one_call(logits, implementation=implementation):
        return branch(changes, lambda: take(change(), drawn), lambda: take(logits, drawn))  # copies no logits
    plain = inputs.features & (SHAPES | PROCESSORS | Flag.DRAWS) == 0
    largest = functools.partial(greedy, implementation=implementation)
    return branch(plain, lambda: take(logits, largest), options)


def _context(inputs: StepInputs, state: RequestState) -> LogitsContext:
    history = state.history[inputs.slots]
    return LogitsContext(
        position=inputs.lengths,
        prompt_length=inputs.prompt_lengths[inputs.last],
        last_token=inputs.tokens[inputs.last],
        in_prompt=(history & 1) == 1,
        generated=history >> 1,
    )
