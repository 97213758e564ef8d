"""Bounds of pages: they are those of the stored keys, and rows choose the same pages by them everywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernel_cases import Case, assert_attends, build
from helpers.thorough import by_default
from rekindle_kernels import LayerKV, abstract_pages, bound_pages, init_pages, paged_attention, unavailable_reason
from rekindle_kernels import write_kv as write
from rekindle_kernels.ops.attention import ATTENTION, AttentionCall
from rekindle_kernels.reference import chosen_keys, sequence_keys_values
from rekindle_kernels.xla import page_bounds

WAYS = ["xla", *(["native"] if unavailable_reason("cpu") is None else [])]
LONG = {"decode": (700, 3, 0, 260, 64, 65, 511), "page_size": 16}
CASES = (
    Case("rows", **LONG, head_dim=64, heads=6, kv_heads=2),
    Case("rows_and_prompts", **LONG, prefill=((20, 70), (33, 90)), idle_prefills=1, padding=5, head_dim=64),
    Case("bfloat16_pages", **LONG, head_dim=128, kv_dtype="bfloat16"),
    Case("int8_pages", **LONG, head_dim=64, heads=9, kv_heads=3, kv_dtype="int8"),
    Case("int8_int4_pages", **LONG, prefill=((20, 70),), head_dim=64, kv_dtype="int8-int4"),
    Case("int4_pages", **LONG, head_dim=64, kv_dtype="int4"),
    Case("sinks_and_a_cap", **LONG, head_dim=64, kv_dtype="bfloat16", soft_cap=5.0, sinks=True),
    Case("one_head", decode=(1000,), heads=1, kv_heads=1, head_dim=32, page_size=32),
)


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def bounded(kv: LayerKV, implementation: str = "xla") -> LayerKV:
    """Return pages with bounds of every page but the scratch page."""
    shapes = abstract_pages(kv.num_pages, kv.kv_heads, kv.page_size, kv.head_dim, kv.dtype.name, bounded=True)
    assert shapes.bounds is not None, "they were asked for"
    kv = kv._replace(bounds=jnp.zeros(shapes.bounds.shape, shapes.bounds.dtype))
    ids = jnp.arange(1, kv.num_pages)
    return bound_pages(kv, ids, jnp.full(ids.shape, kv.page_size - 1), implementation=implementation)


def bounds_of(kv: LayerKV) -> np.ndarray:
    assert kv.bounds is not None, "the pages have bounds"
    return np.asarray(kv.bounds).view(jnp.bfloat16).astype(np.float32)


@pytest.mark.parametrize("implementation", WAYS)
@pytest.mark.parametrize("dtype", by_default(["bfloat16", "int8", "int8-int4", "float32", "float16", "int4"], 3))
def test_bounds_are_those_of_the_stored_keys_of_full_pages(dtype: str, implementation: str) -> None:
    at = jnp.arange(40)
    kv = init_pages(7, 2, 16, 64, dtype, bounded=True)
    run = jax.jit(partial(bound_pages, implementation=implementation))
    k, v = 3 * numbers(40, 2, 64), numbers(40, 2, 64, seed=1)
    kv = run(write(kv, k, v, 1 + at // 16, at % 16), 1 + at // 16, at % 16)
    keys = np.asarray(sequence_keys_values(kv, jnp.asarray([1, 2]))[0]).reshape(2, 16, 2, 64)
    want = np.stack([keys.min(1), keys.max(1)], 1)
    np.testing.assert_array_equal(bounds_of(kv)[1:3], want.astype(jnp.bfloat16).astype(np.float32))
    assert not bounds_of(kv)[3:].any(), "the third page is not full yet"
    # What was there before does not matter: other tokens are written where a draft was wrong.
    again = write(kv, -k, v, 1 + at // 16, at % 16)
    np.testing.assert_array_equal(bounds_of(again), bounds_of(kv), "writing alone leaves them")
    again = run(again, 1 + at // 16, at % 16)
    np.testing.assert_allclose(bounds_of(again)[1:3], -bounds_of(kv)[1:3, ::-1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("implementation", WAYS)
def test_bounds_stay_within_their_pages(implementation: str) -> None:
    kv = init_pages(4, 1, 16, 64, "bfloat16", bounded=True)
    kv = kv._replace(pages=jnp.ones_like(kv.pages) * 0x3F80)
    ids, offsets = jnp.asarray([1, 2, 3, 3]), jnp.asarray([15, 14, 0, 3])
    got = bound_pages(kv, ids, offsets, most=2, implementation=implementation)
    assert [bool(page.any()) for page in bounds_of(got)[1:]] == [True, False, False]


@pytest.mark.parametrize("most_pages", by_default([2, 5, 16], 2))
@pytest.mark.parametrize("case", by_default(CASES, lambda case: case.name in {"rows_and_prompts", "int8_int4_pages"}),
                         ids=lambda case: case.name)  # fmt: skip
@pytest.mark.parametrize("implementation", WAYS)
def test_rows_attend_to_the_pages_that_the_reference_chooses(case: Case, most_pages: int, implementation: str) -> None:
    problem = build(case, poison=False)
    inputs = replace(problem.inputs, kv=bounded(problem.inputs.kv))
    problem = replace(problem, inputs=inputs, options=replace(problem.options, most_pages=most_pages))
    run = jax.jit(partial(paged_attention, options=problem.options, implementation=implementation))
    got = assert_attends(run, case, problem)
    everything = paged_attention(inputs, replace(problem.options, most_pages=None), implementation="xla")
    rows = len(case.decode)
    short = np.asarray(inputs.kv_lens)[:rows] <= most_pages * case.page_size
    differ = np.abs(np.asarray(everything, np.float32) - np.asarray(got, np.float32))[:rows].max((1, 2)) > 1e-3
    assert not differ[short].any() and differ[~short].all(), "rows with few pages attend to all, others do not"


@pytest.mark.parametrize("implementation", WAYS)
def test_a_budget_of_all_pages_changes_no_bit(implementation: str) -> None:
    problem = build(Case("all", **LONG, head_dim=64, kv_dtype="bfloat16"), poison=False)
    inputs = replace(problem.inputs, kv=bounded(problem.inputs.kv))
    width = inputs.page_table.shape[1]
    run = partial(paged_attention, inputs, implementation=implementation)
    want = run(problem.options)
    np.testing.assert_array_equal(run(replace(problem.options, most_pages=width)), want)
    wide = replace(inputs, page_table=jnp.pad(inputs.page_table, ((0, 0), (0, 3))))
    got = paged_attention(wide, replace(problem.options, most_pages=width), implementation=implementation)
    np.testing.assert_array_equal(got, want)


def test_xla_reads_the_bounds_of_a_few_pages_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(Case("long", **LONG, heads=6, kv_heads=2, head_dim=64), poison=False).inputs
    kv, table, lens = bounded(inputs.kv), jnp.tile(inputs.page_table, (1, 6)), 6 * inputs.kv_lens
    operands = inputs.q, kv, table, lens
    whole = 4 * table.size * 2 * 2 * 64

    def compiled() -> jax.stages.Compiled:
        return jax.jit(lambda *of: page_bounds.choose(*of, 5, 0.1)).lower(*operands).compile()

    want = compiled()
    monkeypatch.setattr(page_bounds, "AT_ONCE", whole // 7)  # the last block has some pages that are not there
    got = compiled()
    for one, other in zip(got(*operands), want(*operands), strict=True):
        np.testing.assert_array_equal(one, other)
    saved = temporary_bytes(want) - temporary_bytes(got)
    assert saved > whole // 2, f"all bounds are {whole} bytes, and {saved} fewer are held at once"


def temporary_bytes(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    assert analysis is not None, "XLA counts its memory"
    return int(analysis.temp_size_in_bytes)


def test_the_page_with_the_wanted_key_is_chosen_for_each_head() -> None:
    """A key that a head's queries look for is found wherever it is, and other heads find theirs."""
    problem = build(Case("planted", decode=(500, 500), heads=4, kv_heads=2, head_dim=64, page_size=16), poison=False)
    kv, q, table = problem.inputs.kv, np.array(problem.inputs.q), np.asarray(problem.inputs.page_table)
    places = {(0, 0): 3, (0, 1): 20, (1, 0): 11, (1, 1): 0}
    pages = np.array(kv.pages)
    for (row, head), page in places.items():
        pages[table[row, page], 0, head, 5] = 9 * q[row, 2 * head]
    kv = bounded(kv._replace(pages=jnp.asarray(pages)))
    options = replace(problem.options, most_pages=2)
    for (row, head), page in places.items():
        seen = np.asarray(
            chosen_keys(jnp.asarray(q[row]), kv, problem.inputs.page_table[row], jnp.asarray(500), options)
        )
        # one page in addition to the row's own: that of the planted key, unless the head's other query wants another
        assert seen[head, page * 16 : page * 16 + 16].all() and seen[head].sum() == 32
        assert seen[head, 31 * 16 :].all()


def test_kernels_that_read_all_pages_refuse_to_choose() -> None:
    problem = build(Case("rows", **LONG, head_dim=64), poison=False)
    options = replace(problem.options, most_pages=4)
    call = AttentionCall.of(replace(problem.inputs, kv=bounded(problem.inputs.kv)), options, "gpu")
    reasons = ATTENTION.reasons(call)
    assert {name for name, reason in reasons.items() if reason == "rows choose pages"} >= {"pallas_gpu", "xla_gpu"}
    assert ATTENTION.choose(call).name == "xla" and ATTENTION.choose(replace(call, platform="tpu")).name == "xla"
    assert ATTENTION.reasons(replace(call, platform="cpu", deterministic=True))["native"] == "rows choose pages"
