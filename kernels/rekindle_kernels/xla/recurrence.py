"""Recurrent layers in plain JAX: decode rows take one step side by side, prefills go through chunks with products.

A loop passes over (sequence, chunk). Chunks end at multiples of `EDGE` positions, so that a prompt is added up in the
same order however it is cut. Within a chunk the recurrence becomes products of [EDGE, EDGE] and [EDGE, D]: the factor
between tokens i ≥ j is exp(G_i - G_j), with G the running sum of the logarithms of decays.

With a decay for each channel, such factors are a vector for each pair of tokens. Between blocks of `_NEAR` tokens they
are products of two, exp(G_i - G_s) and exp(G_s - G_j), where s is the token before i's block: neither can overflow,
however strong decays are. Within a block each pair is computed by itself.

The delta rules' corrections depend on each other, u_i = beta_i·(v_i - k_iᵀS_{i-1}): a triangular system, whose
inverse is built of blocks of 16. XLA:CPU has no call of its own for it, and LAPACK's would not be in a stored program.

On a CPU, where it has no native kernels, states are moved in loops, and decode rows take their steps one after the
other. XLA:CPU would read an array of states inside the fusion that writes it, and copy it as a whole before each
layer: with 18 layers of 1 MiB a sequence, a step of one row took three times as long. Loops are never fused, and a
row's state stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels.ops.recurrence import (
    EDGE,
    ChannelDeltaOptions,
    ConvolutionInputs,
    ConvolutionOptions,
    DeltaOptions,
    HeadInputs,
    RaggedBatch,
    ScanOptions,
)
from rekindle_kernels.ops.registry import Implementation, anything
from rekindle_kernels.xla.linear import rms_norm

UNIT_EPS = 1e-6  # of the norms of q and k
_NEAR = 8  # tokens of a block whose pairs are computed one by one; of 8 and 16 it has the fewest exponentials
_BLOCK = 16  # rows of a triangle that are inverted one after the other


class _Chunks(NamedTuple):
    """The chunks of a step's prefills, in their order."""

    owner: Array  # int32 [M], the prefill sequence of each
    first: Array  # int32 [M], its first token among the prefills'
    size: Array  # int32 [M], 1 to EDGE
    total: Array  # int32 [], how many are real


def _chunks(batch: RaggedBatch, tokens: int) -> _Chunks:
    lengths = batch.prefill_lengths()
    starts = batch.starts()[batch.decode_rows :]
    head = jnp.minimum(lengths, EDGE - starts % EDGE)  # tokens up to the first edge
    counts = jnp.where(lengths > 0, 1 + (lengths - head + EDGE - 1) // EDGE, 0)
    most = tokens // EDGE + 2 * batch.prefills
    owner = jnp.repeat(jnp.arange(batch.prefills), counts, total_repeat_length=most)
    number = jnp.arange(most) - (jnp.cumsum(counts) - counts)[owner]
    offset = jnp.where(number == 0, 0, head[owner] + (number - 1) * EDGE)
    count = jnp.where(number == 0, head[owner], jnp.minimum(EDGE, lengths[owner] - offset))
    return _Chunks(owner, batch.cu_lengths[owner] + offset, count, jnp.sum(counts))


Rows = tuple[Array, ...]  # arrays of tokens
Results = tuple[Array, Array]  # of the tokens, and the states after them
Chunk = Callable[[Rows, Array, Array], Results]  # tokens of a sequence, which of them are real, its state
Step = Callable[[Rows, Array], Results]  # a token of each row, the rows' states


class _Moves(NamedTuple):
    """The ways of a step's states: out of their array, through a step of each decode row, and back."""

    take: Callable[[Array, Array, Array], Array]  # states, reads [n], count -> [n, ...]
    put: Callable[[Array, Array, Array, Array], Array]  # states, writes [n], new, count -> states
    decode: Callable[[Rows, Array, RaggedBatch, Step], Results]  # the decode rows' results, and all states


def _take_in_loop(states: Array, reads: Array, count: Array) -> Array:
    def body(index: Array, taken: Array) -> Array:
        one = lax.dynamic_index_in_dim(states, reads[index], keepdims=False)
        return lax.dynamic_update_index_in_dim(taken, one, index, 0)

    return lax.fori_loop(0, count, body, jnp.zeros((len(reads), *states.shape[1:]), states.dtype))


def _put_in_loop(states: Array, writes: Array, new: Array, count: Array) -> Array:
    def body(index: Array, states: Array) -> Array:
        one = lax.dynamic_index_in_dim(new, index, keepdims=False)
        return lax.dynamic_update_index_in_dim(states, one, writes[index], 0)

    return lax.fori_loop(0, count, body, states)


def _decode_in_loop(rows: Rows, states: Array, batch: RaggedBatch, step: Step) -> Results:
    reads, writes = _slots(batch)
    shape = jax.eval_shape(step, tuple(row[:1] for row in rows), states[:1])[0]

    def body(index: Array, carry: Results) -> Results:
        out, states = carry
        used = (batch.lengths[index] > 0).astype(jnp.int32)
        state = _take_in_loop(states, lax.dynamic_slice_in_dim(reads, index, 1), used)
        state = jnp.where(batch.lengths[index] <= 1, 0, state)
        result, state = step(tuple(lax.dynamic_slice_in_dim(row, index, 1) for row in rows), state)
        states = _put_in_loop(states, lax.dynamic_slice_in_dim(writes, index, 1), state, used)
        return lax.dynamic_update_slice_in_dim(out, result, index, 0), states

    out = jnp.zeros((batch.decode_rows, *shape.shape[1:]), shape.dtype)
    return lax.fori_loop(0, _last(batch.lengths[: batch.decode_rows] > 0), body, (out, states))


def _decode_together(rows: Rows, states: Array, batch: RaggedBatch, step: Step) -> Results:
    reads, writes = (slots[: batch.decode_rows] for slots in _slots(batch))
    before = states[reads]
    used, begins = (_by_row(mask[: batch.decode_rows], states) for mask in (batch.lengths > 0, batch.begins()))
    out, after = step(rows, jnp.where(begins, 0, before))
    if batch.places is not None:
        out, after = _follow(rows, out, after, batch.places, step)
    return out, states.at[writes].set(jnp.where(used, after, before))


def _follow(rows: Rows, out: Array, after: Array, places: Array, step: Step) -> Results:
    """Take the rows of chains their steps, one place after the other, after `out` and `after` of the first places."""

    def body(place: Array, carry: Results) -> Results:
        out, after = carry
        result, state = step(rows, jnp.roll(after, 1, axis=0))
        here = places == place
        return jnp.where(_by_row(here, out), result, out), jnp.where(_by_row(here, after), state, after)

    return lax.fori_loop(1, jnp.max(places) + 1, body, (out, after))


IN_LOOPS = _Moves(_take_in_loop, _put_in_loop, _decode_in_loop)
TOGETHER = _Moves(
    lambda states, reads, count: states[reads],
    lambda states, writes, new, count: states.at[writes].set(new),
    _decode_together,
)


def _slots(batch: RaggedBatch) -> tuple[Array, Array]:
    """Return where the states of the sequences are read and written."""
    own = jnp.arange(batch.sequences)
    return (own, own) if batch.slots is None else batch.slots


def _last(mask: Array) -> Array:
    """Return how many elements there are up to the last that is True."""
    return jnp.max(jnp.where(mask, jnp.arange(len(mask)) + 1, 0), initial=0)


Carry = tuple[Array, Array]  # results of tokens, and states


def _bounded(total: Array, body: Callable[[Array, Carry], Carry], index: Array, carry: Carry) -> Carry:
    """Run a turn of a loop that has more turns than the `total` it needs: the ones beyond change nothing."""
    return lax.cond(index < total, body, lambda _, carry: carry, index, carry)


def _by_row(mask: Array, states: Array) -> Array:
    """Return a mask of rows in the shape of arrays with that first axis."""
    return mask.reshape(-1, *[1] * (states.ndim - 1))


def _scan(moves: _Moves, rows: Rows, states: Array, batch: RaggedBatch, step: Step, chunk: Chunk) -> Results:
    """Run `step` over the decode rows and `chunk` over the chunks of the prefills."""
    R, T = batch.decode_rows, rows[0].shape[0]
    results = []
    if R:
        decoded, states = moves.decode(tuple(row[:R] for row in rows), states, batch, step)
        results.append(decoded)
    if T > R:
        reads, writes = (slots[R:] for slots in _slots(batch))
        padded = tuple(jnp.pad(row[R:], ((0, EDGE), *[(0, 0)] * (row.ndim - 1))) for row in rows)
        chunks = _chunks(batch, T - R)
        taken = moves.take(states, reads, batch.num_prefills)
        before = jnp.where(_by_row(batch.begins()[R:], states), 0, taken)

        def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            out, kept = carry
            sequence, first = chunks.owner[index], chunks.first[index]
            part = tuple(lax.dynamic_slice_in_dim(row, first, EDGE) for row in padded)
            result, state = chunk(part, jnp.arange(EDGE) < chunks.size[index], kept[sequence])
            # Results after the chunk's tokens are overwritten by the next chunk, or lie in the padding.
            return lax.dynamic_update_slice_in_dim(out, result, first, 0), kept.at[sequence].set(state)

        shape = jax.eval_shape(chunk, tuple(row[:EDGE] for row in padded), jnp.ones(EDGE, bool), before[0])[0]
        out = jnp.zeros((T - R + EDGE, *shape.shape[1:]), shape.dtype)
        if batch.differentiable:
            turn = partial(_bounded, chunks.total, body)
            out, kept = lax.fori_loop(0, len(chunks.owner), turn, (out, before))
        else:
            out, kept = lax.fori_loop(0, chunks.total, body, (out, before))
        results.append(out[: T - R])
        after = jnp.where(_by_row(batch.prefill_lengths() > 0, states), kept, taken)
        states = moves.put(states, writes, after, batch.num_prefills)
    return jnp.concatenate(results), states


def _convolution(moves: _Moves, inputs: ConvolutionInputs, options: ConvolutionOptions) -> Results:
    rows, weight, bias, tails, batch = inputs
    C = len(weight)
    x = rows[:, options.first : options.first + C]
    x = x if options.before is None else rows[:, options.before : options.before + C] * x
    y, tails = _convolved(moves, x, weight, bias, tails, batch)
    y = jax.nn.silu(y) if options.silu else y
    return (y if options.behind is None else _columns(rows, options.behind, C) * y), tails


def _convolved(moves: _Moves, x: Array, weight: Array, bias: Array | None, tails: Array, batch: RaggedBatch) -> Results:
    reads, writes = _slots(batch)
    count = _last(batch.lengths > 0)
    taken = moves.take(tails, reads, count)
    R, T, before = batch.decode_rows, x.shape[0], jnp.where(_by_row(batch.begins(), tails), 0, taken)
    back = weight.shape[1] - 1
    taps = weight.astype(jnp.float32)
    prefill = jnp.arange(T - R)
    owner = jnp.searchsorted(batch.cu_lengths[1:], prefill, side="right").clip(0, max(batch.prefills - 1, 0))
    # The rows of a chain are tokens of one sequence, which begins with its first row.
    place = jnp.zeros(R, jnp.int32) if batch.places is None else batch.places
    head = jnp.arange(R) if batch.places is None else jnp.arange(R) - place
    sequence = jnp.concatenate([head, R + owner]) if batch.prefills else head
    within = jnp.concatenate([place, prefill - batch.cu_lengths[owner]]) if batch.prefills else place
    y = x.astype(jnp.float32) * taps[:, -1]
    for distance in range(1, back + 1):
        earlier = jnp.roll(x, distance, axis=0)
        kept = before[sequence, (back + within - distance).clip(0, back - 1)]
        y += jnp.where((within >= distance)[:, None], earlier, kept).astype(jnp.float32) * taps[:, back - distance]
    y = y if bias is None else y + bias.astype(jnp.float32)
    decoded = (batch.lengths[:R] > 0).astype(jnp.int32)
    decoded = decoded if batch.places is None else decoded * (place + 1)
    counts = jnp.concatenate([decoded, batch.prefill_lengths()])
    first = jnp.concatenate([head, R + batch.cu_lengths[:-1]]) if batch.prefills else head
    # Input i of the new tail is the sequence's input i - back from the end, of this step or of the old tail.
    at = counts[:, None] - back + jnp.arange(back)
    new = x[(first[:, None] + at).clip(0, T - 1)]
    tail = before if batch.places is None else jnp.concatenate([before[head], before[R:]])
    old = jnp.take_along_axis(tail, (at + back).clip(0, back - 1)[..., None], axis=1)
    after = jnp.where((at >= 0)[..., None], new.astype(tails.dtype), old)
    return y, moves.put(tails, writes, jnp.where(_by_row(counts > 0, tails), after, taken), count)


def _gated_delta(moves: _Moves, inputs: HeadInputs, options: DeltaOptions) -> Results:
    qkv, projected, weights, states, batch = inputs
    H, D = states.shape[1:3]
    K = options.key_heads
    q, k, v = jnp.split(qkv.astype(jnp.float32), [K * D, 2 * K * D], axis=-1)
    q, k = (jnp.repeat(_unit(_heads(array, K)), H // K, axis=1) for array in (q, k))
    decay = -jnp.exp(weights.log_rate) * _steps(projected, options.step, weights.step_bias)
    beta = jax.nn.sigmoid(_columns(projected, options.beta, H))
    rows = (q * D**-0.5, k, _heads(v, H), decay, beta)
    o, states = _scan(moves, rows, states, batch, _delta_step, _delta_chunk)
    gate = _heads(_columns(projected, options.gate, H * states.shape[3]), H)
    return (rms_norm(o, weights.norm, options.eps) * jax.nn.silu(gate)).reshape(len(qkv), -1), states


def _columns(rows: Array, first: int, count: int) -> Array:
    """Return some columns of rows [T, N] in float32."""
    return rows[:, first : first + count].astype(jnp.float32)


def _heads(rows: Array, heads: int) -> Array:
    return rows.reshape(rows.shape[0], heads, -1)


def _unit(heads: Array) -> Array:
    """Return vectors of length one."""
    return heads * lax.rsqrt(jnp.sum(heads * heads, axis=-1, keepdims=True) + UNIT_EPS)


def _steps(projected: Array, first: int, bias: Array) -> Array:
    """Return the steps of each head, of columns from the first on."""
    return jax.nn.softplus(_columns(projected, first, len(bias)) + bias)


def _delta_step(rows: Rows, states: Array) -> tuple[Array, Array]:
    q, k, v, decay, beta = rows
    states = states * jnp.exp(decay)[..., None, None]
    return _corrected(q, k, v, beta, states)


def _corrected(q: Array, k: Array, v: Array, beta: Array, states: Array) -> tuple[Array, Array]:
    """Return the results of rows, and their states after the correction."""
    change = beta[..., None] * (v - jnp.einsum("rhd,rhdv->rhv", k, states))
    states = states + k[..., None] * change[..., None, :]
    return jnp.einsum("rhd,rhdv->rhv", q, states), states


def _delta_chunk(rows: Rows, real: Array, state: Array) -> tuple[Array, Array]:
    # By heads: [H, EDGE, ...]. Tokens that are not real change nothing: they have no decay and a beta of zero.
    q, k, v, decay, beta = (jnp.swapaxes(row, 0, 1) for row in rows)
    decay, beta = jnp.where(real, decay, 0), jnp.where(real, beta, 0)
    k, v = jnp.where(real[:, None], k, 0), jnp.where(real[:, None], v, 0)
    total = jnp.cumsum(decay, axis=-1)
    factors = _factors(total)
    scaled = k * beta[..., None]
    overlap = jnp.einsum("hid,hjd->hij", scaled, k) * factors
    inverse = _inverse(jnp.tril(overlap, -1))
    values = jnp.einsum("hij,hjv->hiv", inverse, v * beta[..., None])
    keys = jnp.einsum("hij,hjd->hid", inverse, scaled * jnp.exp(total)[..., None])
    change = values - jnp.einsum("hid,hdv->hiv", keys, state)
    scores = jnp.einsum("hid,hjd->hij", q, k) * factors
    out = jnp.einsum("hid,hdv->hiv", q * jnp.exp(total)[..., None], state)
    out = out + jnp.einsum("hij,hjv->hiv", scores, change)
    last = total[:, -1:]
    state = state * jnp.exp(last)[..., None]
    state = state + jnp.einsum("hid,hiv->hdv", k * jnp.exp(last - total)[..., None], change)
    return jnp.swapaxes(out, 0, 1), state


def _channel_delta(moves: _Moves, inputs: HeadInputs, options: ChannelDeltaOptions) -> Results:
    qkv, projected, weights, states, batch = inputs
    H, D, V = states.shape[1:]
    q, k, v = (_heads(part, H) for part in jnp.split(qkv.astype(jnp.float32), [H * D, 2 * H * D], axis=-1))
    steps = _heads(_columns(projected, options.step, H * D) + weights.step_bias, H)
    rate = jnp.exp(weights.log_rate)[:, None]
    decay = -rate * jax.nn.softplus(steps) if options.bound is None else options.bound * jax.nn.sigmoid(rate * steps)
    beta = jax.nn.sigmoid(_columns(projected, options.beta, H))
    rows = (_unit(q) * D**-0.5, _unit(k), v, decay, beta)
    o, states = _scan(moves, rows, states, batch, _channel_step, _channel_chunk)
    gate = _heads(_columns(projected, options.gate, H * V), H)
    return (rms_norm(o, weights.norm, options.eps) * jax.nn.sigmoid(gate)).reshape(len(qkv), -1), states


def _channel_step(rows: Rows, states: Array) -> tuple[Array, Array]:
    q, k, v, decay, beta = rows
    return _corrected(q, k, v, beta, states * jnp.exp(decay)[..., None])


def _channel_chunk(rows: Rows, real: Array, state: Array) -> tuple[Array, Array]:
    q, k, v, decay, beta = (jnp.swapaxes(row, 0, 1) for row in rows)  # as in `_delta_chunk`
    beta = jnp.where(real, beta, 0)
    decay, k, v = (jnp.where(real[:, None], row, 0) for row in (decay, k, v))
    total = jnp.cumsum(decay, axis=1)
    scaled = k * beta[..., None]
    inverse = _inverse(jnp.tril(_overlap(scaled, k, total), -1))
    values = jnp.einsum("hij,hjv->hiv", inverse, v * beta[..., None])
    keys = jnp.einsum("hij,hjd->hid", inverse, scaled * jnp.exp(total))
    change = values - jnp.einsum("hid,hdv->hiv", keys, state)
    out = jnp.einsum("hid,hdv->hiv", q * jnp.exp(total), state)
    out = out + jnp.einsum("hij,hjv->hiv", _overlap(q, k, total), change)
    last = total[:, -1:]
    state = state * jnp.exp(last[:, 0])[..., None]
    state = state + jnp.einsum("hid,hiv->hdv", k * jnp.exp(last - total), change)
    return jnp.swapaxes(out, 0, 1), state


@jax.checkpoint
def _overlap(left: Array, right: Array, total: Array) -> Array:
    """Return the sums over d of left_i·right_j·exp(total_i - total_j) for i ≥ j, zero elsewhere [H, EDGE, EDGE].

    Derivatives compute its factors again: for each pair of a block they are a vector, and there would be all chunks'.
    """
    H, T, D = left.shape
    blocks = (H, T // _NEAR, _NEAR, D)
    own, others, sums = (array.reshape(blocks) for array in (left, right, total))
    before = jnp.concatenate([jnp.zeros_like(total[:, :1]), total[:, _NEAR - 1 : -1 : _NEAR]], axis=1)  # each block
    far = jnp.exp(jnp.minimum(before[:, :, None] - total[:, None], 0)) * right[:, None]
    scores = jnp.einsum("hbid,hbjd->hbij", own * jnp.exp(sums - before[:, :, None]), far)
    earlier = jnp.arange(T) // _NEAR < jnp.arange(T // _NEAR)[:, None]
    scores = jnp.where(earlier[:, None], scores, 0).reshape(H, T, T)
    lower = jnp.tril(jnp.ones((_NEAR, _NEAR), bool))[..., None]
    difference = sums[:, :, :, None] - sums[:, :, None]
    factors = jnp.where(lower, jnp.exp(jnp.where(lower, difference, 0)), 0)
    near = jnp.sum(own[:, :, :, None] * others[:, :, None] * factors, axis=-1)
    diagonal = near[:, :, :, None] * jnp.eye(T // _NEAR)[:, None, :, None]
    return scores + diagonal.reshape(H, T, T)


def _factors(total: Array) -> Array:
    """Return exp(total_i - total_j) for i ≥ j, zero elsewhere [..., EDGE, EDGE]."""
    difference = total[..., :, None] - total[..., None, :]
    lower = jnp.tril(jnp.ones(difference.shape[-2:], bool))
    return jnp.where(lower, jnp.exp(jnp.where(lower, difference, 0)), 0)


def _inverse(lower: Array) -> Array:
    """Return (1 + lower)⁻¹ for a strictly lower triangular matrix [..., EDGE, EDGE]."""
    size = lower.shape[-1]
    if size <= _BLOCK:

        def row(i: Array, result: Array) -> Array:
            found = lax.dynamic_index_in_dim(lower, i, axis=-2)
            own = lax.dynamic_index_in_dim(result, i, axis=-2)
            return lax.dynamic_update_slice_in_dim(result, own - found @ result, i, axis=-2)

        unit = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
        return lax.fori_loop(1, size, row, unit)
    half = size // 2
    blocks = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    top, bottom = _inverse(blocks)
    corner = -bottom @ lower[..., half:, :half] @ top
    upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, bottom], axis=-1)], axis=-2)


def _selective_scan(moves: _Moves, inputs: HeadInputs, options: ScanOptions) -> Results:
    channels, projected, weights, states, batch = inputs
    H, D, V = states.shape[1:]
    G = options.groups
    x, b, c = jnp.split(channels.astype(jnp.float32), [H * V, H * V + G * D], axis=-1)
    x, b, c = _heads(x, H), _heads(b, G), _heads(c, G)
    step = _steps(projected, options.step, weights.step_bias)
    rows = (x * step[..., None], step * -jnp.exp(weights.log_rate), b, c)
    y, states = _scan(moves, rows, states, batch, _scan_step, _scan_chunk)
    return (y + weights.skip[:, None] * x).reshape(len(channels), -1), states


def _grouped(heads: Array, groups: int) -> Array:
    """Split an axis of heads in front into [G, H/G]."""
    return heads.reshape(groups, heads.shape[0] // groups, *heads.shape[1:])


def _scan_step(rows: Rows, states: Array) -> tuple[Array, Array]:
    scaled, decay, b, c = rows
    repeats = scaled.shape[1] // b.shape[1]
    b, c = (jnp.repeat(row, repeats, axis=1) for row in (b, c))
    states = states * jnp.exp(decay)[..., None, None] + b[..., None] * scaled[..., None, :]
    return jnp.einsum("rhd,rhdv->rhv", c, states), states


def _scan_chunk(rows: Rows, real: Array, state: Array) -> tuple[Array, Array]:
    scaled, decay, b, c = (jnp.swapaxes(row, 0, 1) for row in rows)  # [H or G, EDGE, ...]
    groups = b.shape[0]
    decay, scaled = jnp.where(real, decay, 0), jnp.where(real[:, None], scaled, 0)
    total = jnp.cumsum(decay, axis=-1)
    overlap = jnp.einsum("gid,gjd->gij", c, b)
    scores = _grouped(_factors(total), groups) * overlap[:, None]
    values, before, sums = (_grouped(array, groups) for array in (scaled, state, total))
    out = jnp.einsum("grij,grjv->griv", scores, values)
    out = out + jnp.einsum("gid,grdv->griv", c, before) * jnp.exp(sums)[..., None]
    last = sums[..., -1:]
    after = before * jnp.exp(last)[..., None]
    after = after + jnp.einsum("gid,griv->grdv", b, values * jnp.exp(last - sums)[..., None])
    out = out.reshape(-1, *out.shape[2:])
    return jnp.swapaxes(out, 0, 1), after.reshape(state.shape)


def _implementation(run: Any, *, looped: bool = False) -> Implementation:
    name, moves = ("rows", IN_LOOPS) if looped else ("xla", TOGETHER)
    return Implementation(name, partial(run, moves), anything)


CONVOLUTION, CONVOLUTION_ROWS = _implementation(_convolution), _implementation(_convolution, looped=True)
GATED_DELTA, GATED_DELTA_ROWS = _implementation(_gated_delta), _implementation(_gated_delta, looped=True)
CHANNEL_DELTA, CHANNEL_DELTA_ROWS = _implementation(_channel_delta), _implementation(_channel_delta, looped=True)
SELECTIVE_SCAN, SELECTIVE_SCAN_ROWS = _implementation(_selective_scan), _implementation(_selective_scan, looped=True)
