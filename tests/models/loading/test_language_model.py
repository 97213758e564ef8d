"""A checkpoint of a model of images or sounds opens as its language model, under whatever names it is stored."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers import checkpoints
from rekindle._src.models.loading.checkpoint import load
from rekindle.errors import CheckpointError, UnsupportedModel

PREFIXES = {
    "model.language_model": {"model.": "model.language_model."},
    "language_model.model": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
}


def nested(folder: Path, raw: dict[str, Any], prefixes: dict[str, str]) -> Path:
    """The checkpoint inside of one that has a tower for images."""
    folder.mkdir()
    text = {key: value for key, value in raw.items() if key != "architectures"}
    config = {
        "model_type": "seeing",
        "architectures": ["Seeing"],
        "text_config": text,
        "vision_config": {},
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"vision_tower.patch.weight": np.ones((3, 5), np.float32), "model.visual.x": np.ones(2, np.float32)}
    for name, tensor in checkpoints.tensors(raw).items():
        for own, stored in prefixes.items():
            if name.startswith(own):
                name = stored + name.removeprefix(own)
                break
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefixes", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_it_is_the_model_that_its_text_part_is(
    case: str, prefixes: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = checkpoints.CASES[case]
    folder = nested(tmp_path / "nested", raw, prefixes)
    with caplog.at_level(logging.WARNING):
        model = load(folder, dtype="float32")
        load(folder, dtype="float32")
    plain = load(checkpoints.write(tmp_path / "plain", raw), dtype="float32")
    assert model.config == plain.config
    checkpoints.assert_same(model, plain)
    (said,) = [record.getMessage() for record in caplog.records if "language model" in record.getMessage()]
    assert "2 tensors of vision_tower, visual are not" in said


def test_the_whole_model_says_whether_its_embeddings_are_tied(tmp_path: Path) -> None:
    raw = checkpoints.CASES["llama-mha-tied"]
    text = {**raw, "tie_word_embeddings": False}
    folder = nested(tmp_path / "nested", raw, PREFIXES["model.language_model"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text, "tie_word_embeddings": True}))
    assert load(folder, dtype="float32").config.tie_embeddings


def test_sizes_that_the_nested_config_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    from rekindle._src.models.loading.stored import text_config
    from rekindle._src.models.registry import config_from_hf

    # As published for Gemma 3 4B.
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    config = config_from_hf(text_config({"model_type": "gemma3", "text_config": text}))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    with pytest.raises(UnsupportedModel, match=r"config\.json has no head_dim"):
        config_from_hf(text)  # on its own the file is incomplete


def test_a_checkpoint_without_a_language_model_is_refused(tmp_path: Path) -> None:
    raw = checkpoints.CASES["llama"]
    folder = nested(tmp_path / "nested", raw, {"model.": "elsewhere."})
    with pytest.raises(CheckpointError, match="does not hold the llama model"):
        load(folder, dtype="float32")


def test_a_text_part_of_an_unknown_kind_is_named(tmp_path: Path) -> None:
    raw = {**checkpoints.CASES["llama"]}
    folder = nested(tmp_path / "nested", raw, PREFIXES["model.language_model"])
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "qwen9_vl_text"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="qwen9_vl_text"):
        load(folder, dtype="float32")
