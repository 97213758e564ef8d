"""Attention problems that every implementation must solve, and how close to the reference each dtype must come.

A case names what it is about; `build` turns it into arrays, with pages in shuffled order and NaN everywhere that no
sequence may read: in unused pages, in the unwritten end of each last page, and in page 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels import AttentionInputs, AttentionOptions, LayerKV, init_pages, paged_attention
from rekindle_kernels.pages import write_kv


@dataclass(frozen=True)
class Case:
    """`decode`: kv length of each decode row, 0 = empty. `prefill`: (query length, kv length) of each sequence."""

    name: str
    decode: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    idle_prefills: int = 0  # prefill sequences of the static batch that are not real
    padding: int = 0  # tokens after the last prefill token
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    table_width: int | None = None  # pages; None: just wide enough
    dtype: str = "float32"  # of q
    kv_dtype: str | None = None  # of the pages; None: as q
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None  # None: head_dim ** -0.5
    value_size: int | None = None  # of latent pages
    causal: bool = True


MIXED = {"decode": (1, 17, 0, 40), "prefill": ((5, 5), (16, 33), (1, 20)), "idle_prefills": 1, "padding": 10}

CASES = (
    Case("decode_lengths_around_page_borders", decode=(1, 2, 15, 16, 17, 31, 32, 33)),
    Case("decode_single_row", decode=(9,)),
    Case("decode_and_tokens_of_no_prompt", decode=(5, 17), padding=8),
    Case("decode_all_rows_empty", decode=(0, 0)),
    Case("decode_empty_rows_between", decode=(0, 7, 0, 48, 0)),
    Case("decode_wide_table", decode=(3, 50), table_width=40),
    Case("decode_long", decode=(700, 3, 0, 260), page_size=32),
    Case("prefill_whole_prompts", prefill=((1, 1), (16, 16), (17, 17), (30, 30))),
    Case("prefill_chunks_at_an_offset", prefill=((16, 48), (7, 40), (1, 17), (20, 31))),
    Case("prefill_one_token_chunks", prefill=((1, 1), (1, 16), (1, 17))),
    Case("prefill_long_chunk", prefill=((200, 600),), page_size=32, padding=56),
    Case("prefill_none_is_real", decode=(5,), idle_prefills=2, padding=8),
    Case("prefill_wide_table", prefill=((9, 20),), table_width=40, padding=3),
    Case("mixed", **MIXED),
    Case("mixed_page_8", **MIXED, page_size=8),
    Case("mixed_page_64", **MIXED, page_size=64),
    Case("mixed_page_128", **MIXED, page_size=128),
    Case("mixed_head_dim_64", **MIXED, head_dim=64),
    Case("mixed_head_dim_80", **MIXED, head_dim=80),
    Case("mixed_head_dim_128", **MIXED, head_dim=128),
    Case("mixed_head_dim_256", **MIXED, head_dim=256),
    Case("mixed_group_1", **MIXED, heads=3, kv_heads=3),
    Case("mixed_group_3", **MIXED, heads=9, kv_heads=3),
    Case("mixed_group_7", **MIXED, heads=14, kv_heads=2),
    Case("mixed_group_16", **MIXED, heads=16, kv_heads=1),
    Case("mixed_window_1", **MIXED, sliding_window=1),
    Case("mixed_window_of_a_page", **MIXED, sliding_window=16),
    Case("mixed_window_across_pages", **MIXED, sliding_window=21),
    Case("mixed_window_wider_than_all", **MIXED, sliding_window=4096),
    Case("window_far_from_the_start", decode=(700, 300), prefill=((33, 500),), page_size=32, sliding_window=40),
    Case("mixed_soft_cap", **MIXED, soft_cap=2.0),
    Case("mixed_sinks", **MIXED, sinks=True),
    Case("mixed_window_soft_cap_sinks", **MIXED, sliding_window=9, soft_cap=5.0, sinks=True),
    Case("mixed_scale", **MIXED, scale=0.7),
    Case("mixed_bfloat16", **MIXED, dtype="bfloat16", head_dim=64),
    Case("mixed_float16", **MIXED, dtype="float16", head_dim=64),
    Case("mixed_bfloat16_pages", **MIXED, kv_dtype="bfloat16", head_dim=64),
    Case("mixed_int8_pages", **MIXED, kv_dtype="int8", head_dim=64),
    Case("mixed_int8_pages_bfloat16_queries", **MIXED, dtype="bfloat16", kv_dtype="int8", head_dim=64),
)

# Pages whose keys are values too, which some implementations leave to others.
LATENT = (
    Case("latent_mixed", **MIXED, kv_heads=1, head_dim=24, value_size=16),
    Case("latent_group_16", **MIXED, heads=16, kv_heads=1, head_dim=72, value_size=64, sliding_window=21),
    Case("latent_one_decode_row", decode=(9,), kv_heads=1, head_dim=24, value_size=8),
    Case("latent_bfloat16_pages", **MIXED, kv_heads=1, head_dim=72, value_size=64, kv_dtype="bfloat16"),
    Case("latent_int8_pages", **MIXED, kv_heads=1, head_dim=72, value_size=64, kv_dtype="int8"),
)

# Pages of keys and values in fewer bits than a byte, rotated, which Pallas kernels leave to XLA.
PACKED = (
    Case("int8_int4_mixed", **MIXED, head_dim=64, kv_dtype="int8-int4"),
    Case("int8_int4_one_row_and_one_head", decode=(700,), heads=1, kv_heads=1, head_dim=32, kv_dtype="int8-int4"),
    Case(
        "int8_int4_window_soft_cap_sinks", **MIXED, head_dim=64, kv_dtype="int8-int4", sliding_window=9, soft_cap=5.0,
        sinks=True,
    ),
    Case("int8_int4_bfloat16_queries", **MIXED, heads=14, head_dim=64, dtype="bfloat16", kv_dtype="int8-int4"),
    Case("int8_int4_blocks_of_32", **MIXED, head_dim=96, kv_dtype="int8-int4"),
    Case(
        "int8_int4_long", decode=(700, 3, 0, 260), prefill=((200, 600),), head_dim=128, page_size=32,
        kv_dtype="int8-int4",
    ),
    Case("int4_mixed", **MIXED, head_dim=64, kv_dtype="int4"),
    Case("int4_bidirectional", prefill=((5, 5), (33, 33)), head_dim=64, padding=10, causal=False, kv_dtype="int4"),
)  # fmt: skip

# Queries that see the keys after them, too: texts to embed, each of them whole in one step.
WHOLE = {"prefill": ((5, 5), (33, 33), (1, 1), (200, 200)), "idle_prefills": 1, "padding": 10, "causal": False}
BIDIRECTIONAL = (
    Case("bidirectional", **WHOLE),
    Case("bidirectional_one", prefill=((600, 600),), page_size=32, padding=8, causal=False),
    Case("bidirectional_window_1", **WHOLE, sliding_window=1),
    Case("bidirectional_window_across_pages", **WHOLE, sliding_window=21),
    Case("bidirectional_window_in_a_long_one", prefill=((900, 900),), sliding_window=40, causal=False),
    Case("bidirectional_soft_cap_bfloat16_pages", **WHOLE, soft_cap=2.0, kv_dtype="bfloat16", head_dim=64),
)

# Against the float32 oracle that reads the same (rounded, quantised) pages, with values of unit variance, so that
# outputs are at most about 4. Largest absolute error allowed:
#   float32   the order of summation: ~1e-6 measured over 700 keys; 2e-5 leaves room for exp and tanh approximations.
#   float16   probabilities or the output rounded to 11 bits: 4 · 2^-11 = 2e-3, twice that for both.
#   bfloat16  the same with 8 bits: probabilities are rounded before the second dot, then the output: 4 · 2^-8 each.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def tolerance(case: Case) -> float:
    """Return the wider tolerance of the queries' and the pages' types; narrow pages are multiplied in bfloat16."""
    kinds = {case.dtype, case.kv_dtype or case.dtype}
    return max(TOLERANCES.get(kind, TOLERANCES["bfloat16"]) for kind in kinds)


@dataclass(frozen=True)
class Problem:
    """Arguments of `paged_attention`."""

    inputs: AttentionInputs
    options: AttentionOptions
    used: np.ndarray  # bool [T]: tokens that are not padding


def build(case: Case, seed: int = 0, *, poison: bool = True) -> Problem:
    """The case as arrays. With `poison`, whatever may not be read is NaN (int8 pages: 127 with NaN scales)."""
    random = np.random.default_rng(seed)
    lengths = [*case.decode, *(kv for _, kv in case.prefill), *[0] * case.idle_prefills]
    pages_of = [-(-length // case.page_size) for length in lengths]
    width = case.table_width or max([*pages_of, 1])
    num_pages = 1 + sum(pages_of) + 3  # page 0 and three that nobody owns
    shuffled = iter(random.permutation(np.arange(1, num_pages)))
    table = np.zeros((len(lengths), width), np.int32)
    for row, count in enumerate(pages_of):
        table[row, :count] = [next(shuffled) for _ in range(count)]
    if case.causal and case.sliding_window is not None:  # pages before every window were given back
        for row, first in enumerate([*case.decode, *(kv - query + 1 for query, kv in case.prefill)]):
            table[row, : max(0, first - case.sliding_window) // case.page_size] = 0

    kv = filled_pages(case, num_pages, table, lengths, random, poison=poison)
    q_lens = [query for query, _ in case.prefill] + [0] * case.idle_prefills
    tokens = len(case.decode) + sum(q_lens) + case.padding
    normal = random.standard_normal((tokens, case.heads, case.head_dim)).astype(np.float32)
    q = jnp.asarray(normal.astype(jnp.dtype(case.dtype)))
    used = np.array([length > 0 for length in case.decode] + [True] * sum(q_lens) + [False] * case.padding, bool)
    inputs = AttentionInputs(
        q,
        kv,
        jnp.asarray(table),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        jnp.asarray(len(case.prefill), jnp.int32),
        jnp.asarray(random.standard_normal(case.heads), jnp.float32) if case.sinks else None,
    )
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    options = AttentionOptions(
        len(case.decode), scale, case.sliding_window, case.soft_cap, value_size=case.value_size, causal=case.causal
    )
    return Problem(inputs, options, used)


def in_wide_queries(inputs: AttentionInputs) -> AttentionInputs:
    """Return the same problem with float32 queries, as the oracle computes before its output is rounded."""
    return replace(inputs, q=inputs.q.astype(jnp.float32))


def filled_pages(
    case: Case, num_pages: int, table: np.ndarray, lengths: list[int], random: np.random.Generator, *, poison: bool
) -> LayerKV:
    """Return pages with random keys and values at every position that some sequence owns; page 0 belongs to none."""
    shape = (case.kv_heads, case.page_size, case.head_dim)
    allocated = -(-num_pages // 16) * 16  # and tokens are written again, so that many cases share a program
    kv = init_pages(allocated, *shape, case.kv_dtype or case.dtype, latent=case.value_size is not None)
    if poison:
        if kv.scales is not None:
            kv = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan if leaf is kv.scales else 127, leaf.dtype), kv)
        else:
            nan = np.full(kv.pages.shape, np.nan, kv.dtype)
            kv = LayerKV(jnp.asarray(nan.view(kv.pages.dtype)))
    where = [
        (row, at) for row, length in enumerate(lengths) for at in range(length) if table[row, at // case.page_size]
    ]
    if not where:
        return kv
    page_ids = np.array([table[row, at // case.page_size] for row, at in where], np.int32)
    offsets = np.array([at % case.page_size for _, at in where], np.int32)
    values = random.standard_normal((2, len(where), case.kv_heads, case.head_dim)).astype(np.float32)
    again = np.minimum(np.arange(-(-len(where) // 128) * 128), len(where) - 1)
    v = None if kv.latent else jnp.asarray(values[1, again])
    return jax.jit(write_kv)(
        kv, jnp.asarray(values[0, again]), v, jnp.asarray(page_ids[again]), jnp.asarray(offsets[again])
    )


EVERYTHING = Case(
    "window_soft_cap_sinks_over_a_full_ring", decode=(17,), prefill=((70, 330), (3, 3)), padding=2, heads=2,
    kv_heads=1, head_dim=64, dtype="bfloat16", sliding_window=200, soft_cap=5.0, sinks=True,
)  # fmt: skip


def mosaic_cases() -> list[Case]:
    """The shared cases that have prefill, in the types and head sizes that the Mosaic GPU prefill takes."""
    from rekindle_kernels.pallas.gpu import mosaic

    found = []
    for case in CASES:
        if not case.prefill and not case.padding:
            continue
        dtype = case.dtype if case.dtype in mosaic.TYPES else "bfloat16"
        head_dim = case.head_dim if case.head_dim in mosaic.HEAD_DIMS else 64
        kv_dtype = None if case.kv_dtype == "bfloat16" else case.kv_dtype
        found.append(replace(case, dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim))
    return [case for case in dict.fromkeys(found) if case.kv_dtype is None]


def assert_attends(run: Any, case: Case, problem: Problem) -> np.ndarray:
    """Return a kernel's result for a problem, after comparing it with the reference."""
    with jax.default_matmul_precision("highest"):
        want = paged_attention(in_wide_queries(problem.inputs), problem.options, implementation="reference")
    got = np.asarray(run(problem.inputs).astype("float32"))
    assert np.all(np.isfinite(got)), "NaN leaked from a page or position that no query may read"
    np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=tolerance(case))
    assert not got[~problem.used].any(), "padding must give zeros"
    return got
