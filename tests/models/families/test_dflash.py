"""Heads of DFlash: the formulas that their drafts are compared with are transformers', and which ones are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import block_heads, checkpoints, eagle
from rekindle._src.drafts import resting
from rekindle._src.models.loading import checkpoint
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle.errors import CheckpointError, ConfigError, UnsupportedModel
from session.test_state_cache import OPTIONS, tokens

RAW = {**checkpoints.CASES["llama"], "max_position_embeddings": 512}
BLOCKS: dict[str, Any] = {**OPTIONS, "disk_memory": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return checkpoints.model(RAW, checkpoints.tensors(RAW))


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_formulas_are_those_of_transformers(kind: str) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    from transformers import MuseGlimmerAssistantConfig

    raw = block_heads.raw_of(RAW, "flat", layer_types=[kind, "full_attention"], sliding_window=6, causal=False)
    state, E = block_heads.tensors(raw), raw["hidden_size"]
    config = MuseGlimmerAssistantConfig(
        hidden_size=E, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, sliding_window=6, layer_types=raw["layer_types"], block_size=5,
        mask_token_id=raw["mask_token_id"], target_layer_ids=raw["target_layer_ids"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, attn_implementation="eager",
    )  # fmt: skip
    theirs = module.MuseGlimmerAssistantModel(config).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): torch.from_numpy(value) for name, value in state.items()})
    rng = np.random.default_rng(0)
    read, embedded = (rng.standard_normal(shape).astype(np.float32) for shape in ((17, 2 * E), (5, E)))
    cache = pytest.importorskip("transformers.cache_utils").DFlashCache(config=config)
    cache.activate_past_recording()  # as transformers' generator of drafts does: without it, windows are elsewhere
    cache.set_previous_accepted_tokens(17)
    with torch.inference_mode():
        out = theirs(
            noise_embeds=torch.from_numpy(embedded)[None], context_hidden_states=torch.from_numpy(read)[None],
            position_ids=torch.arange(22)[None], attention_mask=torch.ones(1, 22, dtype=torch.long), cache=cache,
        )  # fmt: skip
    found = block_heads.hidden(raw, state, read, embedded)
    np.testing.assert_allclose(out.last_hidden_state[0].numpy(), found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False, "use_swa": True, "swa_window_size": 6},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    ],
    ids=["plain", "windows", "a window"],
)
def test_a_head_is_read_from_gguf(changes: dict[str, Any], tmp_path: Path) -> None:
    raw = block_heads.raw_of(RAW, **changes)
    state = block_heads.tensors(raw)
    expected = checkpoint.load(eagle.write(tmp_path / "folder", raw, state), dtype="float32")
    found = checkpoint.load(block_heads.write_file(tmp_path / "head.gguf", raw, state), dtype="float32")
    assert found.config == dataclasses.replace(expected.config, dtype="float32")
    checkpoints.assert_same(found, expected)


def test_heads_in_gguf_that_cannot_draft(tmp_path: Path) -> None:
    raw = block_heads.raw_of(RAW)
    state = block_heads.tensors(raw)
    more = {"markov_w1": np.ones((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"unexpected: markov_w1\.weight"):
        checkpoint.load(block_heads.write_file(tmp_path / "more.gguf", raw, state, more), dtype="float32")
    with pytest.raises(UnsupportedModel, match=r"dflash\.logit_scale=0\.5 is not implemented"):
        checkpoint.load(block_heads.write_file(tmp_path / "scaled.gguf", raw, state, logit_scale=0.5), dtype="float32")
    with pytest.raises(UnsupportedModel, match=r"target_layer_ids=\[-1, 1\] are not numbers of layers"):
        checkpoint.load(block_heads.write_file(tmp_path / "first.gguf", raw, state, target_layers=[0, 2]))


def test_heads_that_cannot_draft(model: Any, tmp_path: Path) -> None:
    def opened(**changes: Any) -> None:
        raw = block_heads.raw_of(RAW, "flat", **changes)
        head = eagle.write(tmp_path / "head", raw, block_heads.tensors(raw))
        rekindle.open_sync(model, **BLOCKS, drafts=head)

    for match, changes in (
        (r"target_layer_ids=\[-1, 0\] are not numbers of layers", {"target_layer_ids": [-1, 0]}),
        ("block_size=1 in config.json is not from 2", {"block_size": 1}),
        ("markov_rank=4 is not implemented", {"markov_rank": 4}),
    ):
        with pytest.raises(UnsupportedModel, match=match):
            opened(**changes)
    for match, changes in (
        ("reads the layers 1, 10, and this model has", {"target_layer_ids": [0, 9]}),
        ("whose hidden states have 64 numbers, and this one's have", {"hidden_size": 64}),
        ("has mask_token_id=5,000, and the vocabulary of this model has", {"mask_token_id": 5000}),
    ):
        with pytest.raises(ConfigError, match=match):
            opened(**changes)
    (tmp_path / "head" / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"mask_embedding\.pt, a pickle"):
        opened()
    (tmp_path / "head" / "mask_embedding.pt").unlink()
    with pytest.raises(UnsupportedModel, match="Open that model, with drafts="):
        rekindle.open_sync(str(tmp_path / "head"), **BLOCKS)


@pytest.mark.thorough
def test_near_the_end_of_the_context_nothing_is_drafted(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has no room there."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(resting, "PLAIN_STEPS", 0)
    raw = block_heads.raw_of(RAW)
    head, options = eagle.write(tmp_path, raw, block_heads.tensors(raw)), {**BLOCKS, "max_model_len": 96}
    ask: dict[str, Any] = {"max_tokens": 36, "ignore_eos": True, "temperature": 0.0, "logit_bias": {20: 60.0}}
    with rekindle.open_sync(model, **options, drafts="none") as session:
        expected = session.generate_sync(tokens(60, seed=3), **ask).token_ids
    with rekindle.open_sync(model, **options, drafts=head) as session:
        assert session.generate_sync(tokens(60, seed=3), **ask).token_ids == expected
        assert session.stats().accepted_tokens > 10
