"""Matrices that are rounded by texts: nearer to the floats on what they multiply, in the same form as others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from rekindle._src.models.base import LoadedModel, abstract_model
from rekindle._src.models.calibration import calibrated, chosen_scales
from rekindle._src.models.loading import checkpoint, quantize
from rekindle._src.models.nn.packing import Packing
from rekindle.errors import ConfigError
from rekindle.models import calibrate
from rekindle_kernels import int4
from workshop import reference

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LLAMA, MIXTRAL = (checkpoints.CASES[name] | SIZES for name in ("llama", "mixtral"))
GEMMA = checkpoints.CASES["gemma3"] | SIZES
RANDOM = np.random.default_rng(0)


def related_rows(inputs: int) -> np.ndarray:
    """Rows whose columns depend on each other, as those of a model do."""
    mixing = RANDOM.standard_normal((inputs // 4, inputs)).astype(np.float32)
    return RANDOM.standard_normal((500, inputs // 4), np.float32) @ mixing + RANDOM.standard_normal(
        (500, inputs), np.float32
    )


@pytest.mark.parametrize(
    "packing", [Packing(32), Packing(64), Packing(64, minimum=True), Packing(128, True, "float32")]
)
def test_products_change_less_than_by_rounding_to_the_nearest(packing: Packing) -> None:
    matrix, rows = RANDOM.standard_normal((48, 256), np.float32), related_rows(256)
    nearest = quantize.quantize_int4(matrix, packing.group, minimums=packing.minimum, scales=packing.scales)
    found = calibrated(matrix, rows.T @ rows, packing)
    errors = []
    for weight, scale, minimum in (nearest, found):
        assert (weight.shape, scale.shape, scale.dtype) == (nearest[0].shape, nearest[1].shape, nearest[1].dtype)
        values = np.asarray(int4.dequantized(weight, scale, minimum))
        errors.append(np.square(rows @ (values - matrix).T).mean())
    assert errors[1] < 0.5 * errors[0]


def test_columns_that_no_row_has_are_rounded_to_the_nearest() -> None:
    matrix, gram = RANDOM.standard_normal((16, 64), np.float32), np.zeros((64, 64), np.float32)
    weight, scale, _ = calibrated(matrix, gram, Packing(64))
    values = np.asarray(int4.dequantized(weight, scale, None))
    step = np.abs(int4.unpack_scales(scale).astype(np.float32))
    assert np.isfinite(values).all() and np.all(np.abs(values - matrix) <= 4 * step)


def test_scales_are_the_best_of_those_that_are_tried() -> None:
    block = np.full((1, 1, 32), 0.1, np.float32)
    block[0, 0, 0] = 1.0
    scales, _ = chosen_scales(block, np.ones(32, np.float32), Packing(32))
    integers = quantize.int4_rounded(block.copy(), scales, None)
    error = np.square(block - scales.astype(np.float32)[..., None] * (integers - 8)).sum()
    plain, _ = quantize.int4_scales(block, "float16", False)
    integers = quantize.int4_rounded(block.copy(), plain, None)
    assert error <= np.square(block - plain.astype(np.float32)[..., None] * (integers - 8)).sum()


def log_odds(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    logits = reference.prefill(model, tokens, reference.empty_cache(model, len(tokens)))[0]
    return np.asarray(jax.nn.log_softmax(logits))


def divergence(exact: np.ndarray, found: np.ndarray) -> float:
    return float((np.exp(exact) * (exact - found)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        pytest.param(LLAMA, "float32", marks=pytest.mark.slow),
        (LLAMA, "bfloat16"),
        (MIXTRAL, "bfloat16"),
        (GEMMA, "float32"),
    ],
    ids=["llama", "llama-bfloat16", "mixtral", "gemma3"],
)
def test_a_calibrated_model_has_the_form_of_others(raw: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, raw, checkpoints.tensors(raw))
    texts = [RANDOM.integers(3, 150, length).tolist() for length in (64, 40, 5, 100)]
    steps = []
    plan = {"mlp": "int4-32", "attention": "int4-32", "embedding": "int8"}
    made = calibrate(folder, texts, quantize=plan, dtype=dtype, progress=steps.append)
    graph, shapes = abstract_model(made.config, dtype, plan)
    assert made.graph == graph
    assert [(leaf.shape, leaf.dtype) for leaf in made.leaves] == [(leaf.shape, leaf.dtype) for leaf in shapes]
    assert [step.done for step in steps] == list(range(1, steps[-1].total + 1))
    assert str(steps[-1]) == f"{steps[-1].total} of {steps[-1].total} matrices"
    plain = checkpoint.load(folder, dtype="float32")
    nearest = checkpoint.load(folder, dtype=dtype, quantize=plan)
    assert made.fingerprint != nearest.fingerprint
    exact = log_odds(plain, texts[3])
    assert divergence(exact, log_odds(made, texts[3])) < divergence(exact, log_odds(nearest, texts[3]))
    if raw is LLAMA and dtype == "float32":
        assert calibrate(plain, texts, quantize=plan, quiet=True).fingerprint == made.fingerprint


@pytest.mark.slow
def test_a_session_opens_it(tmp_path: Path) -> None:
    texts = ["Once upon a time there was a small boat. " * 20, "The answer is short. " * 20]
    made = calibrate("tiny", texts, max_tokens=200)
    with rekindle.open_sync(made, cache_dir=str(tmp_path), precompile="lazy", quiet=True) as session:
        done = session.generate_sync("Once upon a time", max_tokens=8, temperature=0)
        assert len(done.token_ids) == 8
    assert made.nbytes < checkpoint.load(rekindle.tiny.folder()).nbytes / 2


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, LLAMA, checkpoints.tensors(LLAMA))
    tokens = [list(range(3, 40))]
    with pytest.raises(ConfigError, match="no part in four bits"):
        calibrate(folder, tokens, quantize="int8")
    with pytest.raises(ConfigError, match="is quantised already"):
        calibrate(checkpoint.load(folder, quantize="int8"), tokens)
    with pytest.raises(ConfigError, match="hold too few tokens"):
        calibrate(folder, [[1, 2, 3]])
