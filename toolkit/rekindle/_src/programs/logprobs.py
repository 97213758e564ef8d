"""Log-probabilities of chosen tokens and prompts, and of the whole vocabulary.

Axes: N rows or positions, V vocabulary, T prefill tokens.

`Logprobs` and `PromptLogprobs` are of the model's own distribution, which is vLLM's default mode: log-softmax of the
raw logits, before any option changes them. `Distribution` is for requests that want more than these can carry: many
alternatives, tokens that were named, or the distribution after all options, which a token was drawn from. Programs with
it, and those that score prompts, are compiled when a step first needs one: a prompt's scores are a quarter of the
operations of a small model's prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from rekindle._src.core.records import IntArray, Request, Row, StepPlan, TokenLogprobs
from rekindle._src.core.report_kinds import LOGPROBS, PROMPT_LOGPROBS
from rekindle._src.core.sampling import MAX_LOGPROBS, Sampling
from rekindle._src.models.base import Model
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.row_option import Columns, FeatureRead, RowFlag, RowOption, RowReports
from rekindle._src.programs.step_part import StepInputs, StepPart, branch
from rekindle_kernels import Choice, top_k

Packed = NDArray[np.int32]

WIDTH = 1 + 2 * MAX_LOGPROBS  # the token's own log-probability, the most likely ids, and theirs
LANES = 256  # values that are added at once where the order is fixed
CHUNK = 32  # positions with logits in memory at once, [32, V]; a whole chunk's, 512 x 49152, would be 100 MB


def total_of(values: Array, *, deterministic: bool) -> Array:
    """Return the sums [N, 1] of values [N, V]; deterministic ones are added in an order that does not depend on N.

    XLA's reductions take other orders for other N: of 37 rows with 2,048 tokens, 4 had other last bits alone than with
    others, and of those with 160 tokens, 5 among all 37. The order that is fixed compiles in 0.06 s instead of 0.02,
    which each step program would pay.
    """
    if not deterministic:
        return values.sum(axis=-1, keepdims=True)
    whole, rest = divmod(values.shape[1], LANES)
    if whole:

        def add(index: Array, sums: Array) -> Array:
            return sums + lax.dynamic_slice_in_dim(every, index * LANES, LANES, axis=1)

        every = values
        values = lax.fori_loop(0, whole, add, jnp.pad(every[:, whole * LANES :], ((0, 0), (0, LANES - rest))))
    while values.shape[1] > 1:
        half = -(-values.shape[1] // 2)
        values = values[:, :half] + jnp.pad(values[:, half:], ((0, 0), (0, 2 * half - values.shape[1])))
    return values


def _normaliser(logits: Array, *, deterministic: bool) -> Array:
    """Return the logarithms [N, 1] of the sums of the logits' exponentials."""
    largest = logits.max(axis=-1, keepdims=True)
    return jnp.log(total_of(jnp.exp(logits - largest), deterministic=deterministic)) + largest


def logprobs_of(logits: Array, tokens: Array, *, deterministic: bool = False) -> Array:
    """Return packed int32 [N, WIDTH]. Floats are stored as their bits, so that one transfer carries everything."""
    normaliser = _normaliser(logits, deterministic=deterministic)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1) - normaliser
    count = min(MAX_LOGPROBS, logits.shape[-1])
    top, ids = top_k(logits, count)
    missing = ((0, 0), (0, MAX_LOGPROBS - count))
    top, ids = jnp.pad(top - normaliser, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)
    bits = lax.bitcast_convert_type(jnp.concatenate([chosen, top], axis=1), jnp.int32)
    return jnp.concatenate([bits[:, :1], ids, bits[:, 1:]], axis=1)


def row_logprobs(any_flags: Array | RowFlag, logits: Array, tokens: Array, *, deterministic: bool = False) -> Array:
    """Return `logprobs_of`, or zeros if no row of the step needs log-probabilities."""
    with jax.named_scope("logprobs"):
        return branch(
            any_flags & RowFlag.LOGPROBS != 0,
            lambda: logprobs_of(logits, tokens, deterministic=deterministic),
            lambda: jnp.zeros((logits.shape[0], WIDTH), jnp.int32),
        )


def prompt_logprobs(
    any_flags: Array | RowFlag,
    hidden: Array,
    targets: Array,
    to_logits: Callable[[Array], Array],
    *,
    deterministic: bool = False,
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
            scores = logprobs_of(logits, jnp.maximum(targets[places], 0), deterministic=deterministic)
            return packed.at[places].set(scores, unique_indices=True)

        return lax.fori_loop(0, chunks, one, empty)

    with jax.named_scope("prompt_logprobs"):
        empty = jnp.zeros((T, WIDTH), jnp.int32)
        return branch(any_flags & RowFlag.PROMPT_LOGPROBS != 0, score, lambda: empty)


class LogprobsOption(RowOption):
    """The log-probability of each chosen token, and the most likely ones."""

    option, bits = "sampling.scored", int(RowFlag.LOGPROBS)
    repeats = True

    def flags(self, request: Request) -> int:
        sampling = request.sampling
        return 0 if sampling.logprobs is None or sampling.whole_logprobs else self.bits

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        for row, token, place, own in zip(read.plan.rows, read.tokens, read.places, reports, strict=True):
            sampling = row.request.sampling
            if sampling.logprobs is not None and not sampling.whole_logprobs and token is not None:
                LOGPROBS.put(own, unpack_logprobs(read.columns[place], token, sampling.logprobs))


class Logprobs(StepPart[None, tuple[()]]):
    """Columns next to the token, in programs of all variants."""

    width = WIDTH

    def __init__(self, *, deterministic: bool) -> None:
        self._deterministic = deterministic

    def columns(self, logits: Array, tokens: Array, inputs: StepInputs, chosen_from: Callable[[], Array]) -> Array:
        return row_logprobs(inputs.any_flags, logits, tokens, deterministic=self._deterministic)


class PromptLogprobsOption(RowOption[Array]):
    """The log-probabilities of a prompt's own tokens."""

    option = "sampling.scored"
    bits = steady = int(RowFlag.PROMPT_LOGPROBS)
    per_token = True

    def flags(self, request: Request) -> int:
        return 0 if request.sampling.prompt_logprobs is None else self.bits

    def in_plan(self, plan: StepPlan) -> bool:
        return any(row.request.sampling.prompt_logprobs is not None for row in plan.prefill)

    def write_tokens(self, row: Row, out: IntArray) -> None:
        skipped, targets = _targets(row)
        out[skipped : skipped + len(targets)] = targets

    def unpack(self, columns: Columns) -> Array:
        tokens: Array = columns.tokens
        return tokens

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        first = 0
        for index, row in enumerate(read.plan.prefill, start=len(read.plan.decode)):
            count = row.request.sampling.prompt_logprobs
            if count is not None:
                assert isinstance(read.output, np.ndarray), "the step's program scores prompts"
                skipped, targets = _targets(row)
                scores = zip(read.output[first + skipped :], targets.tolist(), strict=False)
                PROMPT_LOGPROBS.put(reports[index], *[unpack_logprobs(line, token, count) for line, token in scores])
            first += row.length


class PromptLogprobs(StepPart[Array, tuple[()]]):
    """An array of a line for each prefill token, in programs of its variant."""

    variant, has_output = ProgramVariant.PROMPT_LOGPROBS, True

    def __init__(self, *, deterministic: bool) -> None:
        self._deterministic = deterministic

    def output(self, model: Model, hidden: Array, inputs: StepInputs, own: Array, kept: object) -> Array:
        return prompt_logprobs(inputs.any_flags, hidden, own, model.logits, deterministic=self._deterministic)


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
    """Return how many of a row's tokens are not scored, and the tokens after the others, up to one past the row."""
    first = max(row.start, row.request.sampling.scored_from)
    return first - row.start, row.request.token_ids[first + 1 : row.start + row.length + 1]


_INFINITY = 0x7F800000  # the bits of float32's


def model_logprobs(logits: Array, *, deterministic: bool = False) -> Array:
    """Return the log-probabilities [N, V] of the model's own distribution, in the arithmetic of `logprobs_of`."""
    return logits - _normaliser(logits, deterministic=deterministic)


def sampled_logprobs(
    logits: Array, choice: Choice, tokens: Array, any_flags: Array | RowFlag, *, deterministic: bool = False
) -> Array:
    """Return the log-probabilities [N, V] of the distribution that `tokens` [N] were drawn from; -inf is "never".

    `logits` are those after all options that change them. Temperature, top-k, top-p and min-p follow here as a draw
    applies them: top-p counts the weights that top-k leaves, and min-p is relative to the likeliest token. A token on
    the border of the nucleus may fall to either side by rounding, and the one that was drawn counts as inside. In a
    greedy row the token has all of the probability.
    """
    drawing = choice.temperature > 0.0
    largest = logits.max(axis=-1, keepdims=True)
    shifted = (logits - largest) / jnp.where(drawing, choice.temperature, 1.0)[:, None]
    magnitudes = lax.bitcast_convert_type(jnp.abs(shifted), jnp.int32)  # of values <= 0, which sort like integers
    everything = jnp.full(tokens.shape, _INFINITY, jnp.int32)

    def top_k() -> Array:
        limited = (choice.top_k > 0) & (choice.top_k < logits.shape[-1])
        kth = least_magnitude(magnitudes, jnp.ones_like(shifted), choice.top_k.astype(jnp.float32))
        return jnp.where(limited, kth, everything)

    weights = jnp.exp(shifted)
    kth = branch(any_flags & RowFlag.TOP_K != 0, top_k, lambda: everything)
    weights = jnp.where(magnitudes <= kth[:, None], weights, 0.0)

    def top_p() -> Array:
        border = least_magnitude(magnitudes, weights, choice.top_p * weights.sum(axis=-1))
        return jnp.where(choice.top_p < 1.0, border, everything)

    border = branch(any_flags & RowFlag.TOP_P != 0, top_p, lambda: everything)
    support = (magnitudes <= border[:, None]) & (weights >= choice.min_p[:, None]) & (weights > 0.0)
    chosen = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == tokens[:, None]
    support = jnp.where(drawing[:, None], support | chosen, chosen)
    total = total_of(jnp.where(support, jnp.exp(shifted), 0.0), deterministic=deterministic)
    return jnp.where(support, shifted - jnp.log(total), -jnp.inf)


def least_magnitude(magnitudes: Array, weights: Array, target: Array, *, deterministic: bool = False) -> Array:
    """Return the least magnitude [N] at which the weights [N, V] up to it add up to `target` [N], by bisection."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the weights up to low are too few, those up to high are enough
        middle = low + (high - low) // 2
        counted = jnp.where(magnitudes <= middle[:, None], weights, 0.0)
        enough = total_of(counted, deterministic=deterministic)[:, 0] >= target
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    start = jnp.full(target.shape, -1, jnp.int32), jnp.full(target.shape, _INFINITY, jnp.int32)
    return lax.fori_loop(0, 31, halve, start)[1]


def is_whole(sampling: Sampling) -> bool:
    """True if a request's log-probabilities need the whole vocabulary."""
    return sampling.logprobs is not None and sampling.whole_logprobs


class DistributionOption(RowOption):
    """The log-probabilities of the whole vocabulary."""

    option = "sampling.scored"

    def flags(self, request: Request) -> int:
        return int(RowFlag.SAMPLED_LOGPROBS) if request.sampling.logprobs_of == "sampled" else 0

    def in_plan(self, plan: StepPlan) -> bool:
        rows = [row for row in plan.rows if row.request.sampling.logprobs is not None]
        return any(row.samples and row.request.sampling.whole_logprobs for row in rows)

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        for row, token, place, own in zip(read.plan.rows, read.tokens, read.places, reports, strict=True):
            if token is not None and is_whole(row.request.sampling):
                LOGPROBS.put(own, _entry(read.columns[place].view(np.float32), token, row.request.sampling))


class Distribution(StepPart[None, tuple[()]]):
    """Columns next to the token, one for each token of the vocabulary."""

    variant = ProgramVariant.DISTRIBUTION

    def __init__(self, vocab_size: int, *, deterministic: bool) -> None:
        self.width, self._deterministic = vocab_size, deterministic

    def columns(self, logits: Array, tokens: Array, inputs: StepInputs, chosen_from: Callable[[], Array]) -> Array:
        with jax.named_scope("logprobs"):
            fixed = self._deterministic
            result = model_logprobs(logits, deterministic=fixed)

            def sampled() -> Array:
                choice = inputs.choice
                drawn = sampled_logprobs(chosen_from(), choice, tokens, inputs.any_flags, deterministic=fixed)
                return jnp.where(inputs.flag(RowFlag.SAMPLED_LOGPROBS)[:, None], drawn, result)

            result = branch(inputs.any_flags & RowFlag.SAMPLED_LOGPROBS != 0, sampled, lambda: result)
            return lax.bitcast_convert_type(result, jnp.int32)


def _entry(logprobs: NDArray[np.float32], token: int, sampling: Sampling) -> TokenLogprobs:
    """Return a token's entry from the log-probabilities of the whole vocabulary [V]."""
    count = min(sampling.logprobs or 0, len(logprobs))
    top: Any = np.empty(0, np.int64)
    if count:
        top = np.argpartition(-logprobs, count - 1)[:count]
        top = top[np.lexsort((top, -logprobs[top]))]  # of equal ones the first, as `top_k` has them
        top = top[np.isfinite(logprobs[top])]
    drawn = sampling.logprobs_of == "sampled"
    return TokenLogprobs(
        token,
        float(logprobs[token]),
        tuple(top.tolist()),
        tuple(logprobs[top].tolist()),
        tuple(logprobs[list(sampling.logprob_token_ids)].tolist()),
        np.packbits(np.isfinite(logprobs), bitorder="little").tobytes() if drawn else b"",
    )
