"""Masks on the device: tokens among those that are allowed, and rows that are left without one."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from rekindle._src.capabilities.guides import step as guides
from rekindle._src.capabilities.guides.step import Guides
from rekindle._src.core.records import mask_words
from rekindle._src.programs.late_masks import NO_TOKEN
from rekindle._src.programs.sampling import plainly
from rekindle_kernels import greedy


def mask_of(allowed: list[list[int]], vocab: int) -> np.ndarray:
    masks = np.zeros((len(allowed), mask_words(vocab)), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            masks[row, token // 32] |= np.uint32(1 << token % 32)
    return masks.view(np.int32)


def test_tokens_come_with_the_logits_that_they_were_chosen_with() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 70)), jnp.float32)
    tokens, values = Guides().take(jnp.asarray(mask_of([[3, 69], [31, 32], []], 70)))(logits, greedy)
    rows = np.asarray(logits)
    assert np.asarray(tokens).tolist() == [max(3, 69, key=rows[0].__getitem__), max(31, 32, key=rows[1].__getitem__), 0]
    assert np.asarray(values).tolist() == [rows[0, tokens[0]], rows[1, tokens[1]], -np.inf]
    assert np.array_equal(plainly(logits, greedy), rows.argmax(axis=1))


def test_a_row_without_a_token_is_told_and_no_other() -> None:
    logits = jnp.asarray([[1.0, 2.0, -1e9], [1.0, 2.0, -1e9], [-1e9, -1e9, -1e9], [0.0, 1.0, 2.0]], jnp.float32)
    masks = mask_of([[2], [0, 2], [], []], 3)
    masks[2] = -1  # unguided, with a bias on everything
    tokens, values = Guides().take(jnp.asarray(masks))(logits, greedy)
    told = Guides().mark(tokens, jnp.asarray(masks), values)
    assert np.asarray(told).tolist() == [NO_TOKEN, 0, 0, NO_TOKEN]


def test_a_guide_answers_for_its_own_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is held up for a second amid the second of four guides; the third one takes a second itself."""
    wall = cpu = 0.0
    clock = SimpleNamespace(perf_counter=lambda: wall, thread_time=lambda: cpu)
    monkeypatch.setattr(guides, "time", clock)
    laps, found = guides._Clock(), []
    for waits, works in ((0.0, 1e-5), (1.0, 2e-5), (0.0, 1.0), (0.0, 1e-5)):
        wall, cpu = wall + waits + works, cpu + works
        found.append(laps.lap())
    assert found == pytest.approx([1e-5, 2e-5, 1.0, 1e-5])


def test_a_collection_of_garbage_amid_a_guide_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(guides, "time", SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now))
    laps = guides._Clock()
    gc.collect()
    now += 1.0
    assert laps.lap() == guides.QUICK
    now += 1.0
    assert laps.lap() == 1.0, "none ran since"
    gc.collect()
    now += 0.03
    assert laps.lap() == pytest.approx(0.03)
    now += 1.0
    assert laps.lap() == 1.0, "it ran amid the quick one before"
