"""The step program: two buffers and the state on the device in; new pages, new state and one packed result out.

Axes: R decode rows, S prefill sequences, N = R + S rows that may sample, T prefill tokens, V vocabulary.

One call runs the model over [decode rows] + [prefill tokens], computes logits of the N last tokens only, samples, and
records each sampled token in its slot, where the next step reads it. Features that few requests use are inside
`lax.cond`s with small results: a branch that returned logits would copy [N, V] even when it is not taken.

The operand of a late feature is known once the tokens of the step before have been read; the model of the step runs
meanwhile. Such a step is one program, which waits for the operand after the model. Where no program can wait, it runs
as two, `make_forward` and `make_choice`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.models.base import Graph, Model, merge
from rekindle._src.models.hooks import stream_at
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.draft_rows import recording
from rekindle._src.programs.packing import Layout, changed_tables, unpack
from rekindle._src.programs.request_state import RequestState, keep_hidden, record
from rekindle._src.programs.row_option import RowFlag
from rekindle._src.programs.sampling import Take, choose, marked, plainly
from rekindle._src.programs.step_part import ChosenStep, DrawnTokens, StepInputs, StepPart, branch
from rekindle_kernels import draws_in_one_call, greedy

Leaves = Sequence[Array]
Operands = Sequence[Any]  # of each feature in the program


class ChoiceInputs(NamedTuple):
    """The results of a forward program for the choice."""

    logits: Array  # float32 [N, V]
    last: Array  # hidden states of the N last tokens
    streams: tuple[Array, ...] = ()  # [N, E]: of these tokens, the inputs of layers that `Features.streams` names


class StepOutput(NamedTuple):
    """The results that the host reads."""

    rows: Array  # int32 [N, 1 + …]: the token or NOT_FINITE, and the columns of features
    extra: tuple[object, ...]  # of each feature with an output; None where the program does not contain it


class ModelOutput(NamedTuple):
    """The results of the model of a step."""

    model: Model
    hidden: Array  # [R + T, E], after the final norm
    kept: tuple[Any, ...]  # of each feature in the program, from its `hooks`
    streams: tuple[Array, ...] = ()  # [R + T, E]: the inputs of layers that `Features.streams` names


Step = Callable[..., tuple[paged.KV, RequestState, StepOutput]]
Forward = Callable[..., tuple[Any, ...]]
Choice = Callable[[RequestState, ChoiceInputs, Array, Array, Array], tuple[RequestState, Array]]


def make_step(graph: Graph, layout: Layout, page_size: int, *, implementation: str | None = None) -> Step:
    """Return the step of one layout as a pure function. The caller donates pages and state.

    With a `gate`, the address of a `MaskGate`, the program waits after the model for the late operand.
    """

    def step(
        leaves: Leaves,
        kv: paged.KV,
        state: RequestState,
        ints: Array,
        floats: Array,
        operands: Operands,
        gate: Array | None = None,
    ) -> tuple[paged.KV, RequestState, StepOutput]:
        state = state._replace(tables=changed_tables(layout, ints, state.tables))
        inputs = unpack(layout, page_size, ints, floats, state.last_token, state.tables)
        new_kv, computed = _compute(graph, leaves, kv, layout, inputs, operands, implementation)
        new_state, output, tokens = _finished(graph, layout, computed, inputs, state, gate)
        for (part, own), arrays in zip(layout.compiled_with(inputs.own), operands, strict=True):
            if part.follows:
                read = jnp.concatenate(computed.streams or (computed.hidden,), axis=-1)
                chosen = ChosenStep(computed.model, read, inputs, own, arrays, tokens, new_state)
                new_kv = part.follow(chosen, new_kv)
        return new_kv, new_state, output

    return step


def make_forward(graph: Graph, layout: Layout, page_size: int, *, implementation: str | None = None) -> Forward:
    """Return the first half of a late step: everything but the choice of tokens. The caller donates pages.

    Page tables that stay on the device are an operand and the last result; the caller donates them, too.
    """

    def forward(
        leaves: Leaves,
        kv: paged.KV,
        last_token: Array,
        ints: Array,
        floats: Array,
        operands: Operands,
        tables: Array | None = None,
    ) -> tuple[Any, ...]:
        tables = changed_tables(layout, ints, tables)
        inputs = unpack(layout, page_size, ints, floats, last_token, tables)
        new_kv, computed = _compute(graph, leaves, kv, layout, inputs, operands, implementation)
        return new_kv, *finish_forward(layout, computed, inputs), *(() if tables is None else (tables,))

    return forward


def make_choice(layout: Layout, page_size: int, *, implementation: str | None = None) -> Choice:
    """Return the second half: the tokens of each row, with the late operand. The caller donates the state."""

    def choice(
        state: RequestState, scores: ChoiceInputs, ints: Array, floats: Array, operand: Array
    ) -> tuple[RequestState, Array]:
        inputs = unpack(layout, page_size, ints, floats, state.last_token, state.tables)
        new_state, rows, _ = _choose(layout, inputs, state, scores, operand, implementation)
        return new_state, rows

    return choice


def _compute(
    graph: Graph,
    leaves: Leaves,
    kv: paged.KV,
    layout: Layout,
    inputs: StepInputs,
    operands: Operands,
    implementation: str | None,
) -> tuple[paged.KV, ModelOutput]:
    compiled = zip(layout.compiled_with(inputs.own), operands, strict=True)
    hooks = [part.hooks(inputs, own, arrays) for (part, own), arrays in compiled]
    streams, places = dict[int, Array](), layout.features.streams
    listeners = [hook.listener for hook in hooks if hook.listener is not None]
    listeners += [stream_at(streams, places)] if places else []
    deltas = {path: delta for hook in hooks for path, delta in hook.deltas.items()}
    assert len(deltas) == sum(len(hook.deltas) for hook in hooks), "two features add to one matrix"
    model = merge(graph, leaves, deltas)
    fixed = graph.precision.deterministic
    attend = paged.PagedAttention(
        model.config,
        kv,
        inputs.paging,
        layout.rows,
        implementation,
        deterministic=fixed,
        unread=_unread(layout, inputs),
        sees=next((hook.sees for hook in hooks if hook.sees is not None), None),
    )
    positions = next((hook.coordinates for hook in hooks if hook.coordinates is not None), inputs.positions)
    tokens = next((hook.tokens for hook in hooks if hook.tokens is not None), inputs.tokens)
    hidden = model(tokens, positions, attend, lengths=inputs.rope_lengths, listeners=listeners)
    kept = tuple(hook.kept for hook in hooks)
    return tuple(attend.kv), ModelOutput(model, hidden, kept, tuple(streams[layer] for layer in places))


def _unread(layout: Layout, inputs: StepInputs) -> Array | None:
    """Return the number of tokens at the start of the first prompt with unused final hidden states: all but the last,
    or 0 in steps with flags of a feature that reads hidden states. None if the program has no prompts, or has a feature
    that reads hidden states in every step.
    """
    compiled = [(feature.row.bits, feature.part) for feature in layout.compiled]
    every = any(part.follows or (part.has_output and not bits) for bits, part in compiled)
    if not layout.tokens or every:
        return None
    read = functools.reduce(operator.or_, (bits for bits, part in compiled if part.has_output), 0)
    return jnp.where(inputs.any_flags & read != 0, 0, jnp.maximum(inputs.cu_lengths[1] - 1, 0))


def finish(
    graph: Graph,
    layout: Layout,
    computed: ModelOutput,
    inputs: StepInputs,
    state: RequestState,
    gate: Array | None = None,
) -> tuple[RequestState, StepOutput]:
    """Compute a step's results."""
    new_state, output, _ = _finished(graph, layout, computed, inputs, state, gate)
    return new_state, output


def _finished(
    graph: Graph,
    layout: Layout,
    computed: ModelOutput,
    inputs: StepInputs,
    state: RequestState,
    gate: Array | None,
) -> tuple[RequestState, StepOutput, Array]:
    """Compute a step's results, and the tokens [N] that rows chose."""
    scores, extra = finish_forward(layout, computed, inputs)
    operand = None if gate is None else layout.features.late.wait(gate, scores.logits)
    new_state, rows, tokens = _choose(layout, inputs, state, scores, operand, graph.precision.implementation)
    return new_state, StepOutput(rows, extra), tokens


def finish_forward(layout: Layout, computed: ModelOutput, inputs: StepInputs) -> tuple[ChoiceInputs, tuple[Any, ...]]:
    """Compute the results that need no choice: the scores, and the output of each feature that has one."""
    numbers = lax.iota(jnp.int32, layout.sequences) + 1
    needed = jnp.max(numbers, initial=0, where=inputs.flag(RowFlag.CHOOSES))  # 0 where no row samples
    last = computed.hidden[inputs.last]
    streams = tuple(stream[inputs.last] for stream in computed.streams)
    scores = ChoiceInputs(computed.model.logits(last, needed), last, streams)
    outputs: dict[StepPart, object] = {}
    for (part, own), kept in zip(layout.compiled_with(inputs.own), computed.kept, strict=True):
        if part.has_output:
            outputs[part] = part.output(computed.model, computed.hidden, inputs, own, kept)
    return scores, tuple(outputs.get(part) for part in layout.features.outputs)


def _choose(
    layout: Layout,
    inputs: StepInputs,
    state: RequestState,
    scores: ChoiceInputs,
    operand: Array | None,
    implementation: str | None,
) -> tuple[RequestState, Array, Array]:
    """Choose tokens by the scores and the late operand, if there is one. Return the state with these tokens, the rows'
    results for the host, and the tokens.
    """
    late, logits = layout.features.late, scores.logits
    take: Take = plainly if operand is None else late.take(operand)

    def allowed() -> Array:
        changed = _changed(layout, logits, inputs, state)
        return changed if operand is None else late.allow(changed, operand)

    chosen_from, narrowed = allowed, _Narrowing.of(layout, inputs, state)
    with jax.named_scope("sample"):
        if narrowed is None:
            taken = _sample(layout, logits, inputs, state, take, implementation=implementation)
        else:
            changes = inputs.any_flags & layout.features.changing != 0
            changed = branch(changes, lambda: _changed(layout, logits, inputs, state), lambda: logits)
            drawn_from = narrowed.narrow(changed if operand is None else late.allow(changed, operand))
            taken = take(drawn_from, functools.partial(_drawn, inputs, implementation))
            chosen_from = lambda: drawn_from  # noqa: E731  which logits are read, if at all, is decided here

    tokens, values = (taken, None) if operand is None else taken
    shown = marked(tokens, scores.last, logits)
    if operand is not None:
        shown = late.mark(shown, operand, cast(Array, values))
    samples = inputs.flag(RowFlag.SAMPLES)
    counts = samples | recording(inputs, tokens)
    noted = {} if narrowed is None else narrowed.note(tokens, counts)
    columns = [
        noted[part] if part in noted else part.columns(logits, tokens, inputs, chosen_from)
        for part in (feature.part for feature in layout.compiled)
        if part.width
    ]
    slots = jnp.where(samples, inputs.slots, layout.slots)
    counted = jnp.where(counts, inputs.slots, layout.slots)
    kept = jnp.where(inputs.flag(RowFlag.CHOOSES), inputs.slots, layout.slots)
    read = jnp.concatenate(scores.streams or (scores.last,), axis=-1)
    new_state = keep_hidden(record(state, slots, counted, tokens), kept, inputs.lengths, read, tokens)
    if narrowed is not None:
        new_state = new_state._replace(own=tuple(narrowed.own))
    return new_state, jnp.concatenate([shown[:, None], *columns], axis=1), tokens


class _Narrowing:
    """The features of a program that narrow logits before the draw, one after the other."""

    def __init__(self, parts: list[tuple[StepPart, object, int]], inputs: StepInputs, state: RequestState) -> None:
        self._parts, self._inputs = parts, inputs
        self.own = list(state.own)  # the state of each feature, new after `note`
        self._kept: dict[StepPart, object] = {}

    @classmethod
    def of(cls, layout: Layout, inputs: StepInputs, state: RequestState) -> _Narrowing | None:
        """Return the narrowing features of a layout; None without any."""
        compiled = zip(layout.compiled, layout.compiled_with(inputs.own), strict=True)
        parts = [(part, own, layout.features.slot_index(feature)) for feature, (part, own) in compiled if part.narrows]
        return cls(parts, inputs, state) if parts else None

    def narrow(self, logits: Array) -> Array:
        """Return logits [N, V] with minus infinity where a token may not be drawn."""
        for part, own, index in self._parts:
            logits, self._kept[part] = part.narrow(logits, self._inputs, own, self.own[index])
        return logits

    def note(self, tokens: Array, counted: Array) -> dict[StepPart, Array]:
        """Update the features' states by the drawn `tokens` [N]. Return the columns of each feature for the host."""
        columns = {}
        for part, own, index in self._parts:
            drawn = DrawnTokens(tokens, counted, self._kept[part])
            self.own[index], columns[part] = part.note(drawn, self._inputs, own, self.own[index])
        return columns


def _drawn(inputs: StepInputs, implementation: str | None, logits: Array, masks: Array | None) -> Array:
    # Where flags are known while a program is traced, all its rows are greedy.
    return choose(logits, inputs.choice, cast(Array, inputs.any_flags), masks, implementation=implementation)


def _sample(
    layout: Layout,
    logits: Array,
    inputs: StepInputs,
    state: RequestState,
    take: Take = plainly,
    *,
    implementation: str | None,
) -> Any:
    """Return tokens [N], or the result of `take` for changed logits and the function that chooses among them."""
    changing = layout.features.changing
    changes = inputs.any_flags & changing != 0

    def change() -> Array:
        return _changed(layout, logits, inputs, state)

    drawn = functools.partial(_drawn, inputs, implementation)

    def options() -> Any:
        return take(branch(changes, change, lambda: logits), drawn)

    if take is not plainly and draws_in_one_call(logits, implementation=implementation):
        return branch(changes, lambda: take(change(), drawn), lambda: take(logits, drawn))  # copies no logits
    plain = inputs.any_flags & (changing | RowFlag.DRAWS) == 0
    largest = functools.partial(greedy, implementation=implementation)
    return branch(plain, lambda: take(logits, largest), options)


def _changed(layout: Layout, logits: Array, inputs: StepInputs, state: RequestState) -> Array:
    """Return the logits [N, V] as the features of the program change them."""
    for part, own in layout.compiled_with(inputs.own):
        logits = part.change(logits, inputs, own, state)
    return logits
