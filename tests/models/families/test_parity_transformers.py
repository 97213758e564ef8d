"""Every family against transformers itself, on weights that the golden files have never seen, and what it saves today.

The golden files hold what transformers says about prompts in chunks and about decoding.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from golden.make import PROMPT
from helpers import checkpoints
from helpers import transformers_versions as versions
from rekindle._src.models.loading import checkpoint
from workshop import reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4  # of the logits' standard deviation
CURRENT = int(transformers.__version__.partition(".")[0]) >= 5
SHORT = -8.0  # before softplus: steps of 0.0003, where `time_step_min` is 0.001
FIELDS = {"num_layers", "num_kv_heads", "head_dim", "moe", "attention", "vocab_size", "tie_embeddings"}


@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
@pytest.mark.parametrize("name", checkpoints.one_each())
def test_live_transformers_computes_the_same_and_what_it_saves_opens_as_the_same(name: str, tmp_path: Path) -> None:
    """It renames keys of config.json over time."""
    raw = dict(checkpoints.CASES[name])
    checkpoints.needs_transformers(raw)
    if why := versions.reason(versions.UNABLE, name, transformers.__version__):
        pytest.skip(f"this version of transformers can't make it: {why}")
    raw = raw if CURRENT and versions.release(transformers.__version__) >= (5, 15) else versions.older_names(raw)
    if not CURRENT:
        raw |= {"mamba_n_groups": 1} if raw["model_type"] == "granitemoehybrid" else {}  # 4 normed all groups together
        if rope := raw.pop("rope_parameters", None):
            scaling = {key: value for key, value in rope.items() if "mscale" not in key}  # which 4 left out of scores
            raw |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    state = checkpoints.tensors(raw, seed=7)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints.write(tmp_path / "ours", raw, state), attn_implementation="eager", dtype=torch.float32,
        output_loading_info=True,
    )  # fmt: skip
    assert not any(info.values()), f"transformers would not load the checkpoint as it is: {info}"
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0].float().numpy()
    model = checkpoints.model(raw, state)
    logits, _ = reference.prefill(model, PROMPT, reference.empty_cache(model, len(PROMPT)))
    off = np.abs(np.asarray(logits) - expected).max() / expected.std()
    otherwise = versions.reason({**versions.OTHERWISE, **versions.READ_OTHERWISE}, name, transformers.__version__)
    assert off <= TOLERANCE or otherwise, off
    theirs.save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs" / "config.json").read_text())
    loaded = checkpoint.load(tmp_path / "theirs", dtype="float32")
    # Older versions have other defaults of ropes.
    for field in FIELDS if CURRENT and otherwise is None else FIELDS - {"attention"}:
        assert getattr(loaded.config, field) == getattr(model.config, field), f"{field}: {saved}"
    assert loaded.graph.paths == model.graph.paths
    for path, ours, found in zip(model.graph.paths, model.leaves, loaded.leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(ours), err_msg=path)


@pytest.mark.filterwarnings("ignore")
def test_steps_of_nemotron_h_have_no_least_length(tmp_path: Path) -> None:
    """Prompts of transformers have one (5.24), its single tokens none: the authors' code and vLLM follow the config."""
    if why := versions.reason(versions.UNABLE, "nemotron-h", transformers.__version__):
        pytest.skip(f"this version of transformers can't make it: {why}")
    raw, bounded = dict(checkpoints.CASES["nemotron-h"]), False
    raw = raw if versions.release(transformers.__version__) >= (5, 15) else versions.older_names(raw)
    state = checkpoints.tensors(raw, seed=7)
    for name in state:
        if name.endswith("dt_bias"):
            state[name] = np.full_like(state[name], SHORT)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints.write(tmp_path / "ours", raw, state), attn_implementation="eager", dtype=torch.float32
    )
    model = checkpoints.model(raw, state)
    logits, _ = reference.prefill(model, PROMPT, reference.empty_cache(model, len(PROMPT)))

    def off() -> float:
        with torch.no_grad():
            expected = theirs(torch.tensor([PROMPT])).logits[0].float().numpy()
        return float(np.abs(np.asarray(logits) - expected).max() / expected.std())

    before = off()
    for module in theirs.modules():
        if hasattr(module, "time_step_limit"):
            bounded = bounded or module.time_step_limit[0] > 0
            module.time_step_limit = tuple(theirs.config.time_step_limit)
    assert off() <= TOLERANCE
    assert before > 20 * TOLERANCE or not bounded, "the bound changes little, so that this proves nothing"
