"""int8 weights are as near as eight bits allow, the same from every source, and the model still agrees with itself."""

from __future__ import annotations

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading import checkpoint, quantize, reading
from workshop import reference

KINDS = "int8-weight", "int8"
FAMILIES = "llama", "mixtral", "gpt2", "phi3", "qwen3-moe", "gemma3", "olmo2", "ling3", "apertus"
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


@settings(max_examples=200, deadline=None)
@given(
    rows=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
        elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
    ),
    dtype=st.sampled_from(FLOATS),
)
def test_every_weight_is_within_half_a_step(rows: np.ndarray, dtype: type) -> None:
    rows = rows.astype(dtype)
    weight, scale = quantize.quantize(rows)
    assert (weight.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, rows.shape[:1])
    assert np.all(np.abs(weight.astype(int)) <= quantize.LEVELS)
    exact = rows.astype(np.float64)
    error = np.abs(weight * scale[:, None].astype(np.float64) - exact)
    assert np.all(error <= scale[:, None] * 0.5001 + 1e-30)
    largest = np.abs(exact).max(axis=1)
    assert np.all((np.abs(weight.astype(int)).max(axis=1) == quantize.LEVELS) | (largest < 1e-27)), (
        "all levels are used"
    )


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 99), dtype=st.sampled_from(FLOATS))
def test_signs_are_alike_and_blocks_do_not_show(seed: int, dtype: type) -> None:
    rows = np.random.default_rng(seed).standard_normal((300, 700)).astype(dtype)  # 93 rows fit into a block
    weight, scale = quantize.quantize(rows)
    negative, same = quantize.quantize(-rows)
    np.testing.assert_array_equal(negative, -weight)
    np.testing.assert_array_equal(same, scale)
    one_by_one = [quantize.quantize(row[None]) for row in rows]
    np.testing.assert_array_equal(weight, np.concatenate([w for w, _ in one_by_one]))
    np.testing.assert_array_equal(scale, np.concatenate([s for _, s in one_by_one]))


def test_stacks_have_a_scale_per_expert_and_channel() -> None:
    stack = np.random.default_rng(0).standard_normal((3, 8, 16)).astype(np.float32)
    weight, scale = quantize.quantize(stack)
    assert (weight.shape, scale.shape) == (stack.shape, (3, 8))
    for expert in range(3):
        np.testing.assert_array_equal(weight[expert], quantize.quantize(stack[expert])[0])


def test_rows_of_zeros_stay_zero() -> None:
    weight, scale = quantize.quantize(np.zeros((2, 5), np.float32))
    assert not weight.any() and np.isfinite(scale).all()


@pytest.mark.parametrize("embeddings", by_default([True, False]))
@pytest.mark.parametrize("name", by_default([*FAMILIES], 4))
def test_loading_quantises_the_assembled_matrices(
    name: str, embeddings: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1000)
    folder = checkpoints.write(tmp_path, checkpoints.CASES[name], checkpoints.tensors(checkpoints.CASES[name]))
    loaded = checkpoints.leaves(checkpoint.load(folder, quantize="int8", quantize_embeddings=embeddings))
    whole = checkpoints.leaves(checkpoints.case(name))
    quantised = {path for path, leaf in loaded.items() if leaf.dtype == np.int8}
    assert {path.removesuffix("weight") + "scale" for path in quantised} == loaded.keys() - whole.keys()
    assert ("embed.weight" in quantised) is embeddings
    assert len(quantised) >= 4 * 2
    for path in quantised:
        weight, scale = quantize.quantize(whole[path])
        np.testing.assert_array_equal(loaded[path], weight, err_msg=path)
        np.testing.assert_array_equal(loaded[path.removesuffix("weight") + "scale"], scale, err_msg=path)


def logits(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    return np.asarray(reference.prefill(model, tokens, reference.empty_cache(model, len(tokens)))[0])


@pytest.mark.parametrize(
    ("name", "kind"),
    by_default([*(("llama", kind) for kind in KINDS), ("apertus", "int8"), ("ling3", "int8-weight")]),
)
def test_the_quantised_model_agrees_with_float32(name: str, kind: str, tmp_path: Path) -> None:
    raw = checkpoints.CASES[name] | (checkpoints.EVERY_EXPERT if name == "ling3" else {})
    exact = checkpoints.model(raw, checkpoints.tensors(raw))
    folder = checkpoints.write(tmp_path, raw, checkpoints.tensors(raw))
    tokens = np.random.default_rng(0).integers(0, 160, 64).tolist()
    want, got = logits(exact, tokens), logits(checkpoint.load(folder, quantize=kind), tokens)
    log_p, log_q = jax.nn.log_softmax(want), jax.nn.log_softmax(got)
    assert np.mean(want.argmax(-1) == got.argmax(-1)) >= 0.85
    assert float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()) < 0.01
    assert np.abs(want - got).max() > 1e-4, "it really ran quantised"
