"""The running requests' state on the device, one slot each, and the only two functions that change it.

Axes: L slots (the last is scratch: padding rows read and write it), V vocabulary, C context length, N rows, F size of
what a drafter reads of a token.

A step reads a slot's last token and counts the token that it samples, without the host. The request's earlier tokens
(its prompt and, after a preemption, its earlier output) may never pass through a step, because their pages were cached.
`admit` writes them before the first step of an epoch, and only for requests that read them: those with penalties, a
logit bias, a `min_tokens` mask, processors or a feature with a `SlotState`. Other requests ignore the slot's contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from rekindle._src.core.records import HIDDEN_KEPT, IntArray, Row
from rekindle._src.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from rekindle.errors import InvalidRequest

MAX_END_IDS = MAX_STOP_TOKEN_IDS + 16  # stop token ids and the checkpoint's eos ids
BIAS_LIMIT = 1e9  # replaces an infinite bias: above any logit, and the difference of two is still a number
NOWHERE = 2**31 - 1  # an index that scatters with mode="drop" ignore
Arrays = TypeVar("Arrays")  # a feature's part of the state, a pytree


class SlotAdmission(NamedTuple):
    """A request that enters its slot, on the device."""

    slot: Array  # []
    tokens: Array  # int32 [C]: its prompt and its earlier output; NOWHERE after them, and for tokens that aren't text
    ints: Array  # [SlotState.ints]
    floats: Array  # [SlotState.floats]


class SlotState(Generic[Arrays]):
    """A feature's own part of the request state, which `admit` writes. This one is empty; it is the base of others.

    Only the programs that contain the feature read and write it: see `StepPart.narrow` and `StepPart.note`.
    """

    ints: int = 0  # of an admission
    floats: int = 0

    def shapes(self, slots: int) -> Arrays:
        """Return the shapes of its arrays for this many slots, the scratch slot included."""
        nothing: Any = ()
        return nothing

    def pack(self, row: Row, ints: IntArray, floats: NDArray[np.float32]) -> None:
        """Write a fresh row's integers, each NOWHERE so far, and floats, each 0 so far."""

    def admit(self, arrays: Arrays, admission: SlotAdmission) -> Arrays:
        """Return the arrays with a slot's entries replaced by its new request's."""
        return arrays


class RequestState(NamedTuple):
    """State arrays with one entry per slot."""

    last_token: Array  # int32 [L]
    history: Array  # int32 [L, V]: twice the times that the token was generated, plus 1 if the prompt has it
    bias_ids: Array  # int32 [L, MAX_LOGIT_BIAS]
    bias_values: Array  # float32 [L, MAX_LOGIT_BIAS]
    end_ids: Array  # int32 [L, MAX_END_IDS]
    tables: Array | None = None  # int32 [L, W]: page tables, where they stay on the device; see `packing`
    # Of the latest tokens, each at its position modulo HIDDEN_KEPT, if a drafter reads them
    hidden: Array | None = None  # [L, HIDDEN_KEPT, F]: the final hidden state, or the inputs of layers
    after: Array | None = None  # int32 [L, HIDDEN_KEPT]: the token after it
    # Of each feature that has a `SlotState`; programs without such a feature neither take nor return it
    own: tuple[object, ...] = ()


def abstract_state(
    slots: int,
    vocab: int,
    width: int | None = None,
    hidden: tuple[int, Any] | None = None,
) -> RequestState:
    """Return the shapes of the state of `slots` requests and the scratch slot,
    with page tables if `width` is given, and with kept hidden states if their size and dtype are."""
    L = slots + 1
    shapes = (L,), (L, vocab), (L, MAX_LOGIT_BIAS), (L, MAX_LOGIT_BIAS), (L, MAX_END_IDS)
    dtypes = jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.int32
    leaves: Any = map(jax.ShapeDtypeStruct, shapes, dtypes)
    tables: Any = None if width is None else jax.ShapeDtypeStruct((L, width), jnp.int32)
    state = RequestState(*leaves)._replace(tables=tables)
    if hidden is None:
        return state
    size, dtype = hidden
    kept: Any = jax.ShapeDtypeStruct((L, HIDDEN_KEPT, size), dtype)
    after: Any = jax.ShapeDtypeStruct((L, HIDDEN_KEPT), jnp.int32)
    return state._replace(hidden=kept, after=after)


def own_parts(slots: int, own: Sequence[SlotState]) -> tuple[object, ...]:
    """Return the shapes of features' `own` parts of the state of `slots` requests and the scratch slot."""
    return tuple(part.shapes(slots + 1) for part in own)


def record(state: RequestState, slots: Array, counted: Array, tokens: Array) -> RequestState:
    """Record the `tokens` [N] as the last ones of `slots` [N], and in the history of the slots `counted` [N].

    A row without a token names the scratch slot. An accepted draft's token is only counted: the host brings the
    request's next token.
    """
    return state._replace(
        last_token=state.last_token.at[slots].set(tokens), history=state.history.at[counted, tokens].add(2)
    )


def keep_hidden(state: RequestState, slots: Array, lengths: Array, hidden: Array, tokens: Array) -> RequestState:
    """Keep the `hidden` states [N, F] of the last of `lengths` [N] tokens of `slots` [N], and the `tokens` [N] after
    them."""
    if state.hidden is None or state.after is None:
        return state
    places = jnp.maximum(lengths - 1, 0) % HIDDEN_KEPT
    kept = state.hidden.at[slots, places].set(hidden.astype(state.hidden.dtype))
    return state._replace(hidden=kept, after=state.after.at[slots, places].set(tokens))


def admission_sizes(context: int, own: Sequence[SlotState] = ()) -> tuple[int, int]:
    """Return the lengths of `admit`'s integer and float buffers."""
    ints, floats = sum(part.ints for part in own), sum(part.floats for part in own)
    return 2 + context + MAX_LOGIT_BIAS + MAX_END_IDS + ints, MAX_LOGIT_BIAS + floats


def pack_admission(row: Row, context: int, own: Sequence[SlotState] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Pack a fresh row's history, bias and end ids for `admit`.

    Raise `InvalidRequest` where `min_tokens` would have to mask more than MAX_END_IDS tokens.
    """
    sampling, prompt = row.request.sampling, row.request.token_ids
    size, float_size = admission_sizes(context, own)
    ints, floats = np.full(size, NOWHERE, np.int32), np.zeros(float_size, np.float32)
    ints[0], ints[1] = row.slot, len(prompt)
    tokens = prompt if row.outputs is None else np.concatenate([prompt, row.outputs])
    ints[2 : 2 + len(tokens)] = tokens
    for start, stop in row.request.extensions.uncounted:
        ints[2 + start : 2 + stop] = NOWHERE
    bias = sampling.logit_bias
    offset = 2 + context
    ints[offset : offset + len(bias)] = list(bias)
    floats[: len(bias)] = np.clip(list(bias.values()), -BIAS_LIMIT, BIAS_LIMIT)
    # Only ids that a vocabulary can have: a checkpoint may name any number as its end.
    ends = sorted(token for token in row.request.eos_ids | row.request.stop_ids if 0 <= token < NOWHERE)
    if not sampling.min_tokens:
        ends = []
    elif len(ends) > MAX_END_IDS:
        raise InvalidRequest(
            "min_tokens",
            sampling.min_tokens,
            f"has to mask the request's {len(ends)} end tokens, and {MAX_END_IDS} are possible",
            "Use 0, fewer stop_token_ids, or ignore_eos=True",
        )
    offset += MAX_LOGIT_BIAS
    ints[offset : offset + len(ends)] = ends
    offset, first = offset + MAX_END_IDS, MAX_LOGIT_BIAS
    for part in own:
        part.pack(row, ints[offset : offset + part.ints], floats[first : first + part.floats])
        offset, first = offset + part.ints, first + part.floats
    return ints, floats


def admit(state: RequestState, ints: Array, floats: Array, own: Sequence[SlotState] = ()) -> RequestState:
    """Replace a slot's history, bias and end ids, and features' `own` entries, by its new request's."""
    context = ints.shape[0] - admission_sizes(0, own)[0]
    slot, prompt_length = ints[0], ints[1]
    after_ends = context + MAX_LOGIT_BIAS + MAX_END_IDS
    tokens, bias_ids, end_ids, rest = jnp.split(ints[2:], (context, context + MAX_LOGIT_BIAS, after_ends))
    more = floats[MAX_LOGIT_BIAS:]
    generated = lax.iota(jnp.int32, context) >= prompt_length
    counts = jnp.zeros_like(state.history[0])
    counts = counts.at[jnp.where(generated, NOWHERE, tokens)].max(1, mode="drop")
    counts = counts.at[jnp.where(generated, tokens, NOWHERE)].add(2, mode="drop")
    parts = []
    for part, arrays in zip(own, state.own, strict=True):
        parts.append(part.admit(arrays, SlotAdmission(slot, tokens, rest[: part.ints], more[: part.floats])))
        rest, more = rest[part.ints :], more[part.floats :]
    return state._replace(
        own=tuple(parts),
        history=state.history.at[slot].set(counts),
        bias_ids=state.bias_ids.at[slot].set(bias_ids),
        bias_values=state.bias_values.at[slot].set(floats[:MAX_LOGIT_BIAS]),
        end_ids=state.end_ids.at[slot].set(end_ids),
    )
