"""The CPU path: every way of cutting the work gives the same result, and only what is owned is read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernel_cases import CASES, Case, build, tolerance
from helpers.thorough import by_default
from rekindle_kernels import AttentionOptions, LayerKV, paged_attention
from rekindle_kernels.ops.attention import ATTENTION, AttentionCall
from rekindle_kernels.xla import attention as xla

BY_NAME = {case.name: case for case in CASES}
SMALL = xla.Blocks(decode_rows=3, decode_keys=32, prefill_queries=8, prefill_keys=32)
CUT = (
    "decode_lengths_around_page_borders",
    "decode_empty_rows_between",
    "decode_long",
    "prefill_chunks_at_an_offset",
    "mixed_window_across_pages",
    "mixed_window_soft_cap_sinks",
    "mixed_int8_pages",
    "window_far_from_the_start",
)


def outputs(case: Case, name: str) -> np.ndarray:
    problem = build(case)
    run = jax.jit(partial(paged_attention, options=problem.options, implementation=name))
    return np.asarray(run(problem.inputs).astype("float32"))


@pytest.mark.parametrize(
    "name", by_default(CUT, lambda name: name in ("decode_empty_rows_between", "prefill_chunks_at_an_offset"))
)
def test_many_small_blocks_agree_with_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "BLOCKS", SMALL)
    case = BY_NAME[name]
    np.testing.assert_allclose(outputs(case, "xla"), outputs(case, "reference"), rtol=0, atol=tolerance(case))


def keys_read(case: Case, monkeypatch: pytest.MonkeyPatch) -> int:
    """Keys that running the case reads, counted as it runs."""
    counted: list[int] = []
    real = xla.read_block

    def counting(kv: LayerKV, pages: jax.Array, *others: Any) -> xla.KeyBlock:
        jax.debug.callback(lambda: counted.append(pages.size * kv.page_size))
        return real(kv, pages, *others)

    monkeypatch.setattr(xla, "read_block", counting)
    monkeypatch.setattr(xla, "BLOCKS", SMALL)
    problem = build(case, poison=False)
    run = jax.jit(partial(paged_attention, options=problem.options, implementation="xla"))
    jax.block_until_ready(run(problem.inputs))
    jax.effects_barrier()
    return sum(counted)


def test_a_wider_table_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"decode": (40, 3, 0, 64), "prefill": ((9, 60),)}
    few, many = (keys_read(Case("", **lengths, table_width=width), monkeypatch) for width in (4, 64))
    # Two blocks of the first three sorted rows, none of the empty one; two blocks for the only block of queries.
    assert few == many == 2 * 3 * 32 + 2 * 32


def test_empty_rows_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_read(Case("", decode=(0,) * 7, idle_prefills=2, padding=9, table_width=8), monkeypatch) == 0


def test_short_rows_do_not_pay_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rows, one long: only its chunk of three follows it."""
    case = Case("", decode=(5, 5, 5, 320, 5, 5, 5, 5, 5))
    assert keys_read(case, monkeypatch) == 3 * 320 + 2 * 3 * 32


def test_a_window_reads_only_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("", decode=(640,), prefill=((8, 640),), sliding_window=20)
    assert keys_read(case, monkeypatch) == 32 + 32


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, 2000])
def test_int8_attention_keeps_the_tail_of_many_small_weights(length: int) -> None:
    """One key outweighs each of the others 255 times: in eight bits their weights would vanish, half of the result."""
    q = jnp.full((1, 1, 1, 16), 0.5)
    keys = jnp.zeros((1, 1, length, 16), jnp.int8).at[0, 0, 0].set(127)
    values = jnp.full((1, 1, length, 16), 127, jnp.int8).at[0, 0, 0].set(-127)
    ones = jnp.full((1, 1, 1, length), 1 / 127)
    block = xla.KeyBlock(keys, values, ones * np.log(255) / 8, ones)
    running = xla.absorb(xla.start(q.shape, None), q, block, None, AttentionOptions(decode_rows=1, scale=1.0))
    want = ((length - 1) / 255 - 1) / ((length - 1) / 255 + 1)
    np.testing.assert_allclose(xla.finish(running)[0, 0, 0], want, rtol=0, atol=5e-3)  # each weight to 1/(127 · 254)


@pytest.mark.parametrize("window", by_default([40, None]))
def test_parts_of_a_picture_see_each_other(window: int | None) -> None:
    """Queries see keys after them, up to the end of their picture; the others see none."""
    prefill = ((70, 90), (33, 33))
    case = Case("pictures", decode=(17, 5), prefill=prefill, padding=3, sliding_window=window, heads=4, kv_heads=2)
    problem = build(case, poison=window is None)
    sees = np.zeros(problem.inputs.q.shape[0], np.int32)
    sees[2 + 4 : 2 + 64] = 84  # of the first prompt, positions 24 to 84
    sees[2 + 70 : 2 + 70 + 20] = 20  # of the second, positions 0 to 20
    inputs = replace(problem.inputs, sees=jnp.asarray(sees))
    run = jax.jit(paged_attention, static_argnames=("options", "implementation"))
    found = np.asarray(run(inputs, problem.options, implementation="xla"))
    expected = np.asarray(run(inputs, problem.options, implementation="reference"))
    np.testing.assert_allclose(found[problem.used], expected[problem.used], atol=2e-5)
    before = np.asarray(run(problem.inputs, problem.options, implementation="reference"))
    same = np.isclose(before, expected, atol=1e-6).all((1, 2))
    assert same[:6].all() and not same[6 : 6 + 59].any() and same[65:72].all()
    chosen = ATTENTION.choose(AttentionCall.of(inputs, problem.options), None)
    assert chosen.name == "xla", "no other one knows of pictures"
