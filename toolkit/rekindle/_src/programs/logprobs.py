"""Log-probabilities of the model's own distribution: log-softmax of the raw logits, before any option changes them.

Axes: N rows or positions, V vocabulary, T prefill tokens.

This is vLLM's default mode: the distribution of the model, not the one that was sampled from, which `distribution` has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from rekindle._src.core.records import IntArray, Request, Row, TokenLogprobs
from rekindle._src.core.sampling import MAX_LOGPROBS
from rekindle._src.models.base import Model
from rekindle._src.programs.feature import Columns, Feature, Fields, Read, StepInputs
from rekindle._src.programs.flags import Flag, branch
from rekindle_kernels import top_k

Packed = NDArray[np.int32]

WIDTH = 1 + 2 * MAX_LOGPROBS  # the token's own log-probability, the most likely ids, and theirs
CHUNK = 32  # positions whose logits exist at once, [32, V]; those of a whole chunk, 512 x 49152, would be 100 MB


def logprobs_of(logits: Array, tokens: Array) -> Array:
    """Return packed int32 [N, WIDTH]. Floats are stored as their bits, so that one transfer carries everything."""
    largest = logits.max(axis=-1, keepdims=True)
    normaliser = jnp.log(jnp.exp(logits - largest).sum(axis=-1, keepdims=True)) + largest
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1) - normaliser
    count = min(MAX_LOGPROBS, logits.shape[-1])
    top, ids = top_k(logits, count)
    missing = ((0, 0), (0, MAX_LOGPROBS - count))
    top, ids = jnp.pad(top - normaliser, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)
    bits = lax.bitcast_convert_type(jnp.concatenate([chosen, top], axis=1), jnp.int32)
    return jnp.concatenate([bits[:, :1], ids, bits[:, 1:]], axis=1)


def row_logprobs(any_flags: Array | Flag, logits: Array, tokens: Array) -> Array:
    """Return `logprobs_of`, or zeros if no row of the step needs log-probabilities."""
    with jax.named_scope("logprobs"):
        return branch(
            any_flags & Flag.LOGPROBS != 0,
            lambda: logprobs_of(logits, tokens),
            lambda: jnp.zeros((logits.shape[0], WIDTH), jnp.int32),
        )


def prompt_logprobs(
    any_flags: Array | Flag, hidden: Array, targets: Array, to_logits: Callable[[Array], Array]
) -> Array:
    """Return packed [T, WIDTH]: the log-probability of each target after its position; targets below 0 are skipped.

    `hidden` holds the states of all rows, the T prefill tokens last: slicing them out beforehand would copy them in
    every step. The token at position p is predicted by the hidden state at p - 1, so the first token of a chunk is the
    target of the chunk before: the host passes targets that reach one token past the chunk.
    """
    T = targets.shape[0]
    if not T:
        return jnp.zeros((0, WIDTH), jnp.int32)
    other_rows = hidden.shape[0] - T
    size = min(CHUNK, T)

    def score() -> Array:
        # Positions that are scored come first: of many short continuations in a step, a chunk has 32, not some of each.
        wanted = targets >= 0
        order = jnp.argsort(~wanted, stable=True)
        chunks = -(-wanted.sum() // size)

        def one(index: Array, packed: Array) -> Array:
            start = jnp.minimum(index * size, T - size)  # the last chunk may overlap the one before
            places = lax.dynamic_slice_in_dim(order, start, size)
            logits = to_logits(hidden[other_rows + places])
            return packed.at[places].set(logprobs_of(logits, jnp.maximum(targets[places], 0)), unique_indices=True)

        return lax.fori_loop(0, chunks, one, empty)

    with jax.named_scope("prompt_logprobs"):
        empty = jnp.zeros((T, WIDTH), jnp.int32)
        return branch(any_flags & Flag.PROMPT_LOGPROBS != 0, score, lambda: empty)


class Logprobs(Feature):
    """The log-probability of each chosen token, and the most likely ones: columns beside the token."""

    bits, width = int(Flag.LOGPROBS), WIDTH

    def flags(self, request: Request) -> int:
        sampling = request.sampling
        return 0 if sampling.logprobs is None or sampling.whole_logprobs else self.bits

    def columns(self, logits: Array, tokens: Array, inputs: StepInputs, chosen_from: Callable[[], Array]) -> Array:
        return row_logprobs(inputs.any_flags, logits, tokens)

    def read(self, read: Read, fields: Fields) -> None:
        for row, token, place, own in zip(read.plan.rows, read.tokens, read.places, fields, strict=True):
            sampling = row.request.sampling
            if sampling.logprobs is not None and not sampling.whole_logprobs and token is not None:
                own["logprobs"] = unpack_logprobs(read.columns[place], token, sampling.logprobs)


class PromptLogprobs(Feature):
    """The log-probabilities of a prompt's own tokens: an array of a line for each prefill token."""

    bits = steady = int(Flag.PROMPT_LOGPROBS)
    per_token = has_output = True

    def flags(self, request: Request) -> int:
        return 0 if request.sampling.prompt_logprobs is None else self.bits

    def write_tokens(self, row: Row, out: IntArray) -> None:
        skipped, targets = _targets(row)
        out[skipped : skipped + len(targets)] = targets

    def unpack(self, columns: Columns) -> Any:
        return columns.tokens

    def output(self, model: Model, hidden: Array, inputs: StepInputs, own: Array, kept: Any) -> Array:
        return prompt_logprobs(inputs.any_flags, hidden, own, model.logits)

    def read(self, read: Read, fields: Fields) -> None:
        assert read.output is not None, "all programs score prompts"
        first = 0
        for index, row in enumerate(read.plan.prefill, start=len(read.plan.decode)):
            count = row.request.sampling.prompt_logprobs
            if count is not None:
                skipped, targets = _targets(row)
                scores = zip(read.output[first + skipped :], targets.tolist(), strict=False)
                fields[index]["prompt_logprobs"] = tuple(unpack_logprobs(line, token, count) for line, token in scores)
            first += row.length


def unpack_logprobs(packed: Packed, token: int, count: int) -> TokenLogprobs:
    """Return the log-probabilities in one line of WIDTH integers."""
    floats = packed.view(np.float32)
    return TokenLogprobs(
        token,
        float(floats[0]),
        tuple(packed[1 : 1 + count].tolist()),
        tuple(floats[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + count].tolist()),
    )


def _targets(row: Row) -> tuple[int, IntArray]:
    """Return how many of a row's tokens are not scored, and the tokens behind the others, which reach one past it."""
    first = max(row.start, row.request.scored_from)
    return first - row.start, row.request.token_ids[first + 1 : row.start + row.length + 1]
