"""What transformers saves today opens here and computes the same, though it renames keys of config.json over time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from golden.make import NEW, PROMPT
from helpers import checkpoints
from rekindle._src.models.loading import checkpoint
from rekindle._src.models.registry import config_from_hf
from workshop import reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4  # of the logits' standard deviation
CURRENT = int(transformers.__version__.partition(".")[0]) >= 5
FIELDS = {"num_layers", "num_kv_heads", "head_dim", "moe", "attention", "vocab_size", "tie_embeddings"}


@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
@pytest.mark.parametrize("model_type", checkpoints.GENERATING)
def test_a_checkpoint_that_transformers_saved_opens_and_computes_the_same(model_type: str, tmp_path: Path) -> None:
    raw = dict(checkpoints.CASES[checkpoints.ONE_EACH[model_type]])
    checkpoints.needs_transformers(raw)
    if not CURRENT:
        raw |= {"mamba_n_groups": 1} if model_type == "granitemoehybrid" else {}  # 4 normed all groups together
        if rope := raw.pop("rope_parameters", None):
            scaling = {key: value for key, value in rope.items() if "mscale" not in key}  # which 4 left out of scores
            raw |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints.write(tmp_path / "ours", raw), attn_implementation="eager", dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs" / "config.json").read_text())
    loaded = checkpoint.load(tmp_path / "theirs", dtype="float32")
    ours = config_from_hf(raw)
    for field in FIELDS if CURRENT else FIELDS - {"attention"}:  # older versions have other defaults of ropes
        assert getattr(loaded.config, field) == getattr(ours, field), f"{field}: {saved}"
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0].float().numpy()
    logits, _ = reference.prefill(loaded, PROMPT, reference.empty_cache(loaded, len(PROMPT) + NEW))
    assert np.abs(np.asarray(logits) - expected).max() / expected.std() <= TOLERANCE
