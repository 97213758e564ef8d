"""GPU attention with its chunked prefill in Pallas' Mosaic GPU, for Hopper. Decode uses the Triton kernel.

No GPU has run it yet, so it is used only by its name. One warpgroup copies paged keys and values, two multiply.

Axes: T tokens, H heads, K kv heads, D head_dim, S page size, B keys of a block. A program has 128 rows: 64 tokens of
two heads that share their keys, or, where groups are odd, 128 tokens of one head. Each consumer has 64 of them. The
form is that of FlashAttention-3: the tensor memory accelerator (TMA) copies page after page into a ring of blocks, and
while one consumer multiplies, the other takes its softmax.

A copy brings whole pages, so a block holds rows that no query may read: after the sequence's end, and before a sliding
window. Scores of such keys are masked. Their values would be multiplied by zero, which does not help against NaN, so
the producer overwrites them with zeros before it releases the block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from rekindle_kernels import gpus, tuning
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pallas import tiles
from rekindle_kernels.pallas.gpu import attention as triton
from rekindle_kernels.pallas.gpu import block
from rekindle_kernels.tuning import GpuMosaicPrefill

plgpu: Any = mosaic_gpu  # its names differ from one version of JAX to the next
ROWS = 64  # of a consumer: the rows of one matrix instruction
CONSUMERS = 2
PRODUCER = CONSUMERS  # warpgroups 0 and 1 are the consumers
# Registers of a thread. A multiprocessor has 512 for one thread of each of the three warpgroups.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 224, 56


class KernelSizes(NamedTuple):
    """Static sizes of the kernel."""

    block_k: int
    stages: int
    page: int
    kv_heads: int
    group: int
    head_dim: int

    @property
    def copied(self) -> int:
        """Keys of one copy: a page's, or a block's where pages are larger."""
        return min(self.page, self.block_k)

    @property
    def heads(self) -> int:
        """Heads of a program."""
        return CONSUMERS if self.group % CONSUMERS == 0 else 1

    @property
    def tokens(self) -> int:
        """Tokens of a program."""
        return ROWS * CONSUMERS // self.heads


class Ring(NamedTuple):
    """The blocks of keys, or of values, that are in flight; `stages` of them."""

    blocks: Any  # [stages, B, D] in shared memory
    landed: Any  # barriers: the block can be read
    free: Any  # barriers: both consumers have read it


class SharedMemory(NamedTuple):
    """The shared memory of a program."""

    rows: Any  # [consumers, 64, D] in the order of q and of the output
    q: Any  # [consumers, 64, D] in the layout of the matrix instructions
    q_landed: Any  # barriers, one for each consumer
    keys: Ring
    values: Ring
    raw: Any  # barrier: values that the producer still has to overwrite in part
    turns: Any  # barrier at which the consumers take turns with the matrix unit
    weights: Any  # [consumers, 64, B], or None where they stay in registers


class QueryTile(NamedTuple):
    """The rows of one program, and the keys that they see; scalars."""

    sequence: Array
    query: Array  # first token of the sequence, counted in the whole of q
    queries: Array  # tokens of the sequence
    context: Array  # its keys
    first: Array  # first token of the tile within the sequence
    oldest: Array  # first key that some row sees
    low: Array  # blocks [low, high) hold a key that some row sees
    high: Array


def _tile(table_ref: Any, index: Array, sizes: KernelSizes, window: int | None) -> QueryTile:
    sequence, query, queries, context, first = (
        table_ref[row, index] for row in (tiles.SEQUENCE, tiles.QUERY, tiles.QUERIES, tiles.CONTEXT, tiles.FIRST)
    )
    nearest = context - queries + first  # the first row's position
    end = jnp.minimum(nearest + sizes.tokens, context)
    empty = (first >= queries) | (context <= 0)
    size = jnp.int32(sizes.block_k)
    high = jnp.where(empty, 0, lax.div(end + size - 1, size))
    oldest = jnp.int32(0) if window is None else jnp.maximum(nearest - (window - 1), 0)
    low = jnp.minimum(lax.div(oldest, size), high)
    return QueryTile(sequence, query, queries, context, first, oldest, low, high)


def _produce(
    pages_ref: Any, ids_ref: Any, tile: QueryTile, shared: SharedMemory, *, head: Array, sizes: KernelSizes
) -> None:
    """Copy the blocks that the consumers read, a page at a time."""
    block_k, stages, copied = sizes.block_k, sizes.stages, sizes.copied
    # The range of copied positions. Others are replaced by the nearest of these, so that all blocks have equally many
    # copies.
    newest = lax.div(tile.context - 1, jnp.int32(copied)) * copied
    oldest = lax.div(tile.oldest, jnp.int32(copied)) * copied

    def turn(index: Array, carry: None) -> None:
        number = index - tile.low
        slot = lax.rem(number, jnp.int32(stages))
        rows = []
        for part in range(block_k // copied):
            position = jnp.clip(index * block_k + part * copied, oldest, newest)
            page = ids_ref[tile.sequence, lax.div(position, jnp.int32(sizes.page))]
            offset = lax.rem(position, jnp.int32(sizes.page))
            rows.append((page * (2 * sizes.kv_heads) + head) * sizes.page + offset)

        def copy(ring: Ring, half: int, barrier: Any) -> None:
            for part, row in enumerate(rows):
                source = pl.multiple_of(row + half * sizes.kv_heads * sizes.page, copied)
                plgpu.copy_gmem_to_smem(
                    pages_ref.at[pl.ds(source, copied)], ring.blocks.at[slot, pl.ds(part * copied, copied)], barrier
                )

        for ring in (shared.keys, shared.values):
            pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, ring.free.at[slot]))
            if ring is shared.keys:
                copy(ring, 0, ring.landed.at[slot])
        begin = index * block_k
        whole = (begin >= tile.oldest) & (begin + block_k <= tile.context)
        pl.when(whole)(lambda: copy(shared.values, 1, shared.values.landed.at[slot]))

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            copy(shared.values, 1, shared.raw)
            plgpu.barrier_wait(shared.raw)
            columns = next(width for width in (64, 32, 16) if sizes.head_dim % width == 0)
            for row in range(0, block_k, ROWS):
                at = begin + row + plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), 0, layout=plgpu.Layout.WGMMA)
                readable = (at >= tile.oldest) & (at < tile.context)
                for column in range(0, sizes.head_dim, columns):
                    part = shared.values.blocks.at[slot, pl.ds(row, ROWS), pl.ds(column, columns)]
                    part[...] = jnp.where(readable, part[...], jnp.zeros((), part.dtype))
            plgpu.commit_smem()
            for _copy in rows:  # as many arrivals as copies
                plgpu.barrier_arrive(shared.values.landed.at[slot])

    lax.fori_loop(tile.low, tile.high, turn, None)


def _consume(
    q_ref: Any,
    sinks_ref: Any,
    o_ref: Any,
    tile: QueryTile,
    shared: SharedMemory,
    *,
    head: Array,
    warpgroup: Array,
    scoring: block.LogitScaling,
    sizes: KernelSizes,
) -> None:
    """Compute the attention of one consumer's 64 rows."""
    block_k, stages, head_dim, window = sizes.block_k, sizes.stages, sizes.head_dim, scoring.sliding_window
    rows_smem, q_smem, landed = shared.rows.at[warpgroup], shared.q.at[warpgroup], shared.q_landed.at[warpgroup]
    first = tile.first + (0 if sizes.heads > 1 else warpgroup * ROWS)
    token = tile.query + first
    plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(token, ROWS), head], rows_smem, landed)
    plgpu.barrier_wait(landed)
    # Sequences begin at any token, and the swizzled layout in which q is multiplied has groups of eight rows.
    q_smem[...] = plgpu.load(rows_smem, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()

    position = tile.context - tile.queries + first  # of the first row
    low, high = tile.low, tile.high
    # Blocks [clear, shut) hold only keys that every row sees.
    clear = low
    if window is not None:
        clear = lax.div(jnp.maximum(position + ROWS - window, 0) + (block_k - 1), jnp.int32(block_k))
        clear = jnp.clip(clear, low, high)
    shut = jnp.clip(lax.div(position + 1, jnp.int32(block_k)), clear, high)

    def vector(value: Any) -> Array:
        full = jnp.full((ROWS,), value, jnp.float32)
        return plgpu.layout_cast(full, plgpu.Layout.WGMMA.reduce(1))

    def spread(rows: Array, columns: int) -> Array:
        return lax.broadcast_in_dim(rows, (ROWS, columns), [0])

    def take_turns() -> None:
        plgpu.barrier_arrive(shared.turns)
        plgpu.barrier_wait(shared.turns)

    def step(index: Array, state: block.Softmax, *, masked: bool) -> block.Softmax:
        slot = lax.rem(index - low, jnp.int32(stages))
        more = index + stages < high
        plgpu.barrier_wait(shared.keys.landed.at[slot])

        def products(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, q_smem, shared.keys.blocks.at[slot].transpose((1, 0)))
            take_turns()
            return accumulator[...]

        raw = pl.run_scoped(products, plgpu.ACC((ROWS, block_k), jnp.float32))
        pl.when(more)(functools.partial(plgpu.barrier_arrive, shared.keys.free.at[slot]))
        scores = scoring.score(raw)
        if masked:
            layout = plgpu.Layout.WGMMA
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS, block_k), 0, layout=layout)
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, block_k), 1, layout=layout)
            newest = position - index * block_k + row  # counted from the block's first key
            visible = key <= newest
            if window is not None:
                visible &= key > newest - window
            scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(state.top, jnp.max(scores, axis=1) * scoring.exponent)
        weights = jnp.exp2(scores * scoring.exponent - spread(top, block_k))
        shrink = jnp.exp2(state.top - top)
        total = state.total * shrink + jnp.sum(weights, axis=1)
        weights = weights.astype(q_ref.dtype)
        if shared.weights is not None:
            shared.weights[warpgroup] = weights
            plgpu.commit_smem()
            weights = shared.weights.at[warpgroup]
        plgpu.barrier_arrive(shared.turns)
        plgpu.barrier_wait(shared.values.landed.at[slot])
        plgpu.barrier_wait(shared.turns)

        def sums(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, weights, shared.values.blocks.at[slot])
            return accumulator[...]

        added = pl.run_scoped(sums, plgpu.ACC((ROWS, head_dim), jnp.float32))
        pl.when(more)(functools.partial(plgpu.barrier_arrive, shared.values.free.at[slot]))
        return block.Softmax(top, total, state.values * spread(shrink, head_dim) + added)

    top, total = vector(block.LOWEST), vector(0.0)
    if sinks_ref is not None:
        top, total = vector(jnp.maximum(sinks_ref[head] * block.LOG2E, block.LOWEST)), vector(1.0)
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)
    state = block.Softmax(top, total, zeros)
    pl.when(warpgroup == 1)(take_turns)
    if window is not None:
        state = lax.fori_loop(low, clear, functools.partial(step, masked=True), state)
    state = lax.fori_loop(clear, shut, functools.partial(step, masked=False), state)
    state = lax.fori_loop(shut, high, functools.partial(step, masked=True), state)
    pl.when(warpgroup == 0)(take_turns)

    whole = jnp.where(state.total == 0.0, 1.0, state.total)
    plgpu.store(rows_smem, (state.values / spread(whole, head_dim)).astype(o_ref.dtype), optimized=False)
    plgpu.commit_smem()
    left = tile.queries - first

    @pl.when(left >= ROWS)
    def _() -> None:
        plgpu.copy_smem_to_gmem(rows_smem, o_ref.at[pl.ds(token, ROWS), head])

    @pl.when((left > 0) & (left < ROWS))
    def _() -> None:
        def one(row: Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(rows_smem.at[pl.ds(row, 1)], o_ref.at[pl.ds(token + row, 1), head])

        lax.fori_loop(0, left, one, None)

    plgpu.wait_smem_to_gmem(0)


def _kernel(*refs: Any, scoring: block.LogitScaling, sizes: KernelSizes, sinks: bool) -> None:
    q_ref, pages_ref, ids_ref, table_ref, *rest = refs
    sinks_ref = rest.pop(0) if sinks else None
    o_ref, rows, q, q_landed, keys, keys_landed, keys_free, values, values_landed, values_free, raw, turns, *rest = rest
    rings = Ring(keys, keys_landed, keys_free), Ring(values, values_landed, values_free)
    shared = SharedMemory(rows, q, q_landed, *rings, raw, turns, rest[0] if rest else None)
    warpgroup = lax.axis_index("warpgroup")
    first = lax.axis_index("heads")
    # The last tiles of a sequence have the most keys, so they begin first.
    index = table_ref.shape[1] - 1 - lax.axis_index("tiles")
    tile = _tile(table_ref, index, sizes, scoring.sliding_window)
    kv_head = lax.div(first * sizes.heads, jnp.int32(sizes.group))

    @pl.when(warpgroup < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        head = first * sizes.heads + (warpgroup if sizes.heads > 1 else 0)
        _consume(q_ref, sinks_ref, o_ref, tile, shared, head=head, warpgroup=warpgroup, scoring=scoring, sizes=sizes)

    @pl.when(warpgroup == PRODUCER)
    def _() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce(pages_ref, ids_ref, tile, shared, head=kv_head, sizes=sizes)


def _scratch(sizes: KernelSizes, dtype: Any, *, emulated: bool) -> list[Any]:
    """Return shared memory and barriers, in the order of `_kernel`'s arguments."""
    swizzle = plgpu.find_swizzle(sizes.head_dim * jnp.dtype(dtype).itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))
    rows = CONSUMERS, ROWS, sizes.head_dim
    ring = plgpu.SMEM((sizes.stages, sizes.block_k, sizes.head_dim), dtype, transforms=transforms)
    copies = sizes.block_k // sizes.copied
    landed = plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages)
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=sizes.stages)
    buffers = [
        plgpu.SMEM(rows, dtype),
        plgpu.SMEM(rows, dtype, transforms=transforms),
        plgpu.Barrier(num_barriers=CONSUMERS),
        *(ring, landed, free) * 2,
        plgpu.Barrier(num_arrivals=copies),
        plgpu.Barrier(num_arrivals=CONSUMERS),
    ]
    # JAX's interpreter takes no operand of a product from registers.
    return [*buffers, plgpu.SMEM((CONSUMERS, ROWS, sizes.block_k), dtype)] if emulated else buffers


def prefill(
    inputs: AttentionInputs,
    paged: block.PagedKV,
    out: Array | None,  # [T, H, D] with the decode rows done; written in place
    *,
    decode_rows: int,
    scoring: block.LogitScaling,
    config: GpuMosaicPrefill,
    interpret: Any = None,
) -> Array:
    """Compute attention of the prefill tokens: [T, H, D], with the first R tokens taken from `out`."""
    q = inputs.q
    _, heads, head_dim = q.shape
    kv_heads, page = inputs.kv.kv_heads, inputs.kv.page_size
    sizes = KernelSizes(config.block_k, config.stages, page, kv_heads, heads // kv_heads, head_dim)
    table = tiles.tile_table(inputs, decode_rows=decode_rows, rows_per_token=1, block=sizes.tokens)
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    arguments = [q, paged.pages.reshape(-1, head_dim), paged.table, table]
    if inputs.sinks is not None:
        arguments.append(inputs.sinks.astype(jnp.float32))
    kernel = plgpu.kernel(
        functools.partial(_kernel, scoring=scoring, sizes=sizes, sinks=inputs.sinks is not None),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype) if out is None else (),
        scratch_types=_scratch(sizes, q.dtype, emulated=bool(interpret)),
        grid=(table.shape[1], heads // sizes.heads),
        grid_names=("tiles", "heads"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )
    if out is None:
        result: Array = kernel(*arguments)
        return result
    written = jax.new_ref(out)  # XLA fails where rows are written into the result of such a kernel
    kernel(*arguments, written)
    return written[...]


TYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)  # rows of which lie at multiples of 128 bytes, as the copies need them
OLDEST = 0, 12  # the oldest version of JAX whose Mosaic GPU runs the kernel


def supports(call: AttentionCall) -> str | None:
    """Return the reason why the kernel can't serve the call, or None."""
    if jax.__version_info__ < OLDEST:
        return f"jax is {jax.__version__}; the kernel is written for the Mosaic GPU of 0.12"
    if call.q_dtype.name not in TYPES or call.kv_dtype != call.q_dtype:
        return f"queries are {call.q_dtype.name} and pages {call.kv_dtype.name}, not both {' or '.join(TYPES)}"
    if call.head_dim not in HEAD_DIMS:
        return f"head_dim {call.head_dim} is not {' or '.join(map(str, HEAD_DIMS))}"
    keys = tuning.gpu_mosaic_prefill(call.kv_dtype, call.head_dim, call.page_size).block_k
    if call.page_size % 8 or (keys % call.page_size and call.page_size % keys):
        return f"page size {call.page_size} is not a multiple of 8 that divides {keys} or is a multiple of it"
    return gpus.without_mosaic() or triton.supports(call)


def attention(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    prefill_config: tuning.GpuMosaicPrefill | None = None,
    interpret: Any = False,  # True, or JAX's InterpretGPUParams
) -> Array:
    """Compute `ops.attention.paged_attention`. Block sizes default to the values in `tuning`."""
    q, kv, rows, emulated = inputs.q, inputs.kv, options.decode_rows, bool(interpret)
    paged, scoring = triton.paged_and_scoring(inputs, options, interpret=emulated)
    out = triton.decode_rows(inputs, paged, scoring, rows, interpret=emulated) if rows else None
    if q.shape[0] > rows:
        config = prefill_config or tuning.gpu_mosaic_prefill(kv.dtype, q.shape[-1], kv.page_size)
        with jax.named_scope("prefill"):
            out = prefill(inputs, paged, out, decode_rows=rows, scoring=scoring, config=config, interpret=interpret)
    return jnp.zeros_like(q) if out is None else out


ATTENTION = Implementation("pallas_mosaic_gpu", attention, supports)
INTERPRETED = Implementation("pallas_mosaic_gpu_interpret", functools.partial(attention, interpret=True), supports)
