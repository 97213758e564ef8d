"""Training is deterministic to the bit, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from rekindle._src.models.base import abstract_model, merge
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.registry import config_from_hf
from rekindle.tiny import folder
from workshop.tiny import evaluate
from workshop.tiny.corpus import PAD, encoded, pack, train_tokenizer
from workshop.tiny.train import (
    SIZES,
    Recipe,
    Stage,
    batch,
    causal,
    export,
    initial,
    is_matrix,
    logits,
    losses,
    orthogonal,
    train,
)

SMALL = Recipe(
    stages=(Stage(2, 48, 3, copying=0.5), Stage(1, 96, 3)),  # each compiles once, most of this file's time
    warmup=1,
    decay=4,
    checkpoint_every=2,
    vocab_size=320,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_tokenizer(SMALL.vocab_size, sample=100)


def run(words: Tokenizer, work: Path, stop_after: int | None = None) -> tuple[list[float], list[np.ndarray]]:
    history: list[float] = []
    report = lambda number, loss: history.append(loss)  # noqa: E731
    _, leaves = train(SMALL, words, work, stop_after=stop_after, report=report)
    return history, [np.asarray(leaf) for leaf in leaves]


@pytest.mark.thorough
def test_a_run_repeats_to_the_bit_and_a_resumed_one_equals_it(words: Tokenizer, tmp_path: Path) -> None:
    losses_once, leaves_once = run(words, tmp_path / "once")
    losses_again, leaves_again = run(words, tmp_path / "again")
    before, _ = run(words, tmp_path / "resumed", stop_after=4)
    after, leaves_resumed = run(words, tmp_path / "resumed")
    assert len(losses_once) == 6 and len(before) == 4 and len(after) == 2
    assert losses_once == losses_again == before + after
    for once, again, resumed in zip(leaves_once, leaves_again, leaves_resumed, strict=True):
        np.testing.assert_array_equal(once, again)
        np.testing.assert_array_equal(once, resumed)
    assert losses_once[-1] < losses_once[0]


def test_windows_hold_whole_documents_from_the_start(words: Tokenizer) -> None:
    windows = pack(encoded(words, "windows"), 6, 400)
    end = words.token_to_id("<|endoftext|>")
    known = [tuple(ids) for ids in islice(encoded(words, "windows"), 400)]
    for window in windows:
        used = window[window != PAD]
        assert (window[len(used) :] == PAD).all()
        ends = np.flatnonzero(used == end) + 1
        found = [tuple(part.tolist()) for part in np.split(used, ends) if part.size]
        assert all(part in known for part in found if part[-1] == end)
        assert used[-1] == end or len(used) == 400
    assert (windows != PAD).mean() > 0.9


def test_batches_follow_the_stages(words: Tokenizer) -> None:
    assert [batch(words, SMALL, step).shape for step in range(6)] == [(2, 49)] * 3 + [(1, 97)] * 3
    assert not np.array_equal(batch(words, SMALL, 0), batch(words, SMALL, 1))


@pytest.mark.thorough
def test_attention_is_causal_and_equals_the_plain_formula() -> None:
    B, S, H, K, D = 2, 10, 4, 2, 8
    q, k, v = (jax.random.normal(jax.random.key(i), (B * S, n, D)) for i, n in enumerate((H, K, K)))
    found = causal(B, S, 0.3)(0, q, k, v).reshape(B, S, H, D)
    k, v = (jnp.repeat(x.reshape(B, S, K, D), H // K, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bshd->bhqs", q.reshape(B, S, H, D), k) * 0.3
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
    np.testing.assert_allclose(found, jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(scores), v), atol=1e-5)


@pytest.mark.slow
def test_padding_counts_for_nothing() -> None:
    graph, leaves = initial(SMALL, config_from_hf(SMALL.config([0], 0)))
    windows = jnp.arange(20, dtype=jnp.int32).reshape(2, 10)
    padded = jnp.pad(windows, ((0, 0), (0, 6)), constant_values=PAD)
    loss, counts, _ = losses(graph, leaves, windows)
    more, fewer, _ = losses(graph, leaves, padded)
    np.testing.assert_allclose(more[:, :9], loss, atol=1e-5)
    assert not fewer[:, 9:].any() and not more[:, 9:].any() and counts.all()


def test_rates_rise_stay_and_fall_to_zero() -> None:
    recipe = Recipe(stages=(Stage(2, 48, 100),), warmup=10, decay=40)
    assert [recipe.rate(step) for step in (0, 9, 60, 80, 100)] == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


def test_the_recipe_is_that_of_the_shipped_weights() -> None:
    recipe, card = Recipe(), (folder() / "README.md").read_text()
    tokens = sum(stage.steps * stage.rows * stage.length for stage in recipe.stages)
    assert f"{recipe.steps:,} steps over\n{tokens / 1e6:.1f} million tokens" in card


def test_a_recipe_is_scaled_in_all_its_parts() -> None:
    whole = Recipe()
    half = whole.scaled(whole.steps // 2)
    assert half.steps == pytest.approx(whole.steps / 2, abs=len(whole.stages))
    assert (half.decay / half.steps) == pytest.approx(whole.decay / whole.steps, rel=0.02)
    assert [stage.length for stage in half.stages] == [stage.length for stage in whole.stages]


def test_a_larger_model_has_the_corpus_and_the_steps_of_the_shipped_one() -> None:
    recipe = Recipe(**SIZES["30m"])
    _, leaves = abstract_model(config_from_hf(recipe.config([0], 0)), "float32")
    assert 30e6 < sum(leaf.size for leaf in leaves) < 31e6
    assert recipe.stages == Recipe().stages and Recipe(**SIZES["tiny"]) == Recipe()


@pytest.mark.thorough
def test_a_model_grows_without_a_change_of_what_it_says(words: Tokenizer, tmp_path: Path) -> None:
    graph, leaves = initial(SMALL, config_from_hf(SMALL.config([0], 0)))
    rng = np.random.default_rng(3)
    leaves = tuple(leaf + 0.02 * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves)
    export(SMALL, words, graph, leaves, tmp_path)
    large = dataclasses.replace(
        SMALL,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=80,
        stages=(Stage(2, 24, 1),),
    )
    grown, initially = initial(large, config_from_hf(large.config([0], 0)), tmp_path)
    tokens, small = jnp.arange(24, dtype=jnp.int32).reshape(2, 12), load(tmp_path, dtype="float32")
    expected = logits(small.graph, small.leaves, tokens)
    assert float(jnp.abs(expected).max()) > 0.1
    np.testing.assert_allclose(logits(grown, initially, tokens), expected, rtol=1e-4, atol=1e-5)
    # Its halves are not the same for long, or it would stay a small model.
    _, trained = train(large, words, tmp_path / "work", small=tmp_path)
    embedding = np.asarray(trained[grown.paths.index("embed.weight")])
    assert np.abs(embedding[:, :32] - embedding[:, 32:]).max() > 1e-4


def test_sizes_that_a_model_can_not_grow_to_are_refused() -> None:
    large = dataclasses.replace(Recipe(**SIZES["30m"]), hidden_size=640)
    with pytest.raises(ValueError, match="grow into one of 640"):
        initial(large, config_from_hf(large.config([0], 0)), folder())


def test_muon_makes_singular_values_about_one() -> None:
    for shape in ((96, 64), (64, 96)):
        matrix = orthogonal(jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.float32))
        values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
        assert values.min() > 0.5 and values.max() < 1.3
    assert is_matrix("layers.0.mlp.down.weight") and not is_matrix("layers.0.mlp_norm.weight")


@pytest.mark.slow
def test_the_exported_folder_computes_what_was_trained(words: Tokenizer, tmp_path: Path) -> None:
    graph, leaves = initial(SMALL, config_from_hf(SMALL.config([0], 0)))
    rounded = tuple(leaf.astype(jnp.bfloat16).astype(jnp.float32) if leaf.ndim == 2 else leaf for leaf in leaves)
    export(SMALL, words, graph, leaves, tmp_path)
    model = load(tmp_path, dtype="float32")
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
    np.testing.assert_allclose(
        logits(model.graph, model.leaves, tokens), logits(graph, rounded, tokens), rtol=1e-5, atol=1e-5
    )


def test_exact_answers_are_those_that_greedy_decoding_gives(words: Tokenizer) -> None:
    ids, start = evaluate.last_answer(words, [("What is your name?", "My name is Ember.")])
    assert words.decode(ids[start:], skip_special_tokens=False) == "My name is Ember.<|im_end|>"
    assert words.decode(ids[:start], skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def looked_at(tokens: list[int]) -> np.ndarray:
    """[2, H, T]: where each head of the first two blocks looks most, from each position."""
    recipe = Recipe()
    config = config_from_hf(recipe.config([0], 0))
    T, found = len(tokens), []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * config.attention[layer].scale
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf), axis=-1)
        found.append(np.asarray(weights.argmax(-1)))
        return jnp.einsum("hqk,khd->qhd", weights, v)

    merge(*initial(recipe, config))(jnp.asarray(tokens), jnp.arange(T), attend)
    return np.stack(found[:2])


@pytest.mark.thorough
def test_heads_look_back_by_position_and_then_by_what_they_found() -> None:
    line = [int(token) for token in np.random.default_rng(0).choice(2048, 24, replace=False)]
    found = looked_at(line * 3)
    at = np.arange(72)
    for head, distance in enumerate((1, 2, 3)):
        assert np.mean(found[0, head, 8:] == at[8:] - distance) > 0.8
    # From the second line on: the token that followed this one a line, or two lines, ago. Chance is about 3 %.
    followed = found[1, 0, 24:]
    assert np.mean((followed == at[24:] - 23) | (followed == at[24:] - 47)) > 0.5
