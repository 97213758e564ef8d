"""Adapters over six families against what PEFT and transformers computed (tests/golden), in one batch with the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from golden.make_adapters import FAMILIES, NEW, PROMPT, kinds
from helpers import adapters, checkpoints
from helpers.plain_loop import plain_loop
from helpers.thorough import by_default

GOLDEN = Path(__file__).parents[2] / "golden" / "adapters.npz"
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 9, "max_tokens_per_step": 64, "max_model_len": 64, "precompile": "lazy",
    "max_adapter_rank": 16, "disk_memory": 0, "seed": 0, "quiet": True,
}  # fmt: skip


OTHERS = ("qwen3", "gemma2", "gpt2", "qwen3.5-tied-biases")  # CI asks them


@pytest.mark.parametrize(
    "name",
    [  # by default: session/test_adapters.py compares with merged weights
        *by_default((name for name in FAMILIES if name not in OTHERS), 0),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_eight_adapters_in_a_batch_match_peft(name: str, tmp_path: Path) -> None:
    model = checkpoints.case(name)
    with np.load(GOLDEN) as file:
        scores, greedy = file[f"{name}/scores"], file[f"{name}/greedy"]
    folders = {
        str(number): adapters.write(tmp_path / str(number), model.config, **kind)
        for number, kind in enumerate(kinds(name))
    }
    with rekindle.open_sync(model, adapters=folders, **OPTIONS) as session:
        handles = [
            session.submit(PROMPT, adapter=adapter, max_tokens=NEW, ignore_eos=True, prompt_logprobs=0)
            for adapter in (*folders, None)
        ]
        done = [handle.result_sync() for handle in handles]
        for number, expected in enumerate(greedy.tolist()):
            assert list(done[number].token_ids) == expected, f"adapter {number}"
            logprobs = [entry.logprob for entry in done[number].prompt_logprobs or ()]
            np.testing.assert_allclose(logprobs, scores[number], atol=1e-4)
        assert list(done[-1].token_ids) == plain_loop(model, PROMPT, NEW, context=64)
    assert len({tuple(tokens) for tokens in greedy.tolist()}) > 4, "the adapters change little"
