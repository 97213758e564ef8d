"""Every family against logits and greedy tokens that transformers computed (tests/golden), without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from golden.make import KEPT, NEW, PROMPT
from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.loading import checkpoint
from workshop import reference

GOLDEN = Path(__file__).parents[2] / "golden"
# Biases of projections are in gpt-oss too, norms of outputs in gemma2 and mixtures of experts in deepseek-v2.
DEFAULT = tuple(name for name in checkpoints.UNLIKE if name not in ("qwen2", "olmo2", "mixtral"))
TOLERANCE = 2e-4  # of the logits' standard deviation


@pytest.fixture(scope="module")
def golden() -> dict[str, NDArray[np.float32]]:
    arrays: dict[str, NDArray[np.float32]] = {}
    for model_type in checkpoints.GENERATING:
        with np.load(GOLDEN / f"{model_type}.npz") as file:
            arrays |= dict(file)
    return arrays


@pytest.mark.parametrize("name", by_default(checkpoints.one_each(), lambda name: name in DEFAULT))
def test_matches_transformers(name: str, golden: dict[str, NDArray[np.float32]]) -> None:
    check_prompt(name, golden, 8)
    greedy = golden[f"{name}/greedy"].tolist()
    assert reference.generate(checkpoints.case(name), PROMPT, NEW, chunk=8) == greedy, "decoding went another way"


@pytest.mark.parametrize("name", by_default(checkpoints.one_each(), lambda name: name in ("llama", "gemma2")))
def test_a_prompt_at_once_matches_transformers(name: str, golden: dict[str, NDArray[np.float32]]) -> None:
    check_prompt(name, golden, None)


def check_prompt(name: str, golden: dict[str, NDArray[np.float32]], chunk: int | None) -> None:
    model, expected = checkpoints.case(name), golden[f"{name}/logits"]
    room = reference.empty_cache(model, len(PROMPT) + NEW)
    logits, _ = reference.prefill(model, PROMPT, room, chunk)
    worst = np.abs(np.asarray(logits)[list(KEPT)] - expected).max() / expected.std()
    assert worst <= TOLERANCE, f"prefill in chunks of {chunk}: off by {worst:.1e} of the logits' deviation"


@pytest.mark.parametrize("dtype", by_default(["bfloat16", "float16"]))
def test_latent_pages_are_computed_in_16_bits(dtype: str, tmp_path: Path) -> None:
    """XLA has no products of 16 bits for each head on processors without instructions for them."""
    raw = checkpoints.CASES["deepseek-v2"]
    folder = checkpoints.write(tmp_path, raw, checkpoints.tensors(raw))
    found, right = (
        np.asarray(reference.prefill(model, PROMPT, reference.empty_cache(model, len(PROMPT)))[0])
        for model in (checkpoint.load(folder, dtype=dtype), checkpoints.case("deepseek-v2"))
    )
    assert np.abs(found - right).mean() < 0.1 * right.std()


@pytest.mark.parametrize("model_type", checkpoints.GENERATING)
def test_cases_are_of_their_family(model_type: str) -> None:
    assert {raw["model_type"] for raw in checkpoints.FAMILY_CASES[model_type].cases.values()} == {model_type}


def test_greedy_tokens_say_something(golden: dict[str, NDArray[np.float32]]) -> None:
    for name in checkpoints.CASES:
        assert len(set(golden[f"{name}/greedy"].tolist())) >= 8, f"{name} repeats itself, so decoding is not tested"
