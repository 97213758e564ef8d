"""A checkpoint of a model of images or sounds opens as its language model, under whatever names it is stored."""

from __future__ import annotations

import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers import checkpoints
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.loading.named_tensors import named_tensors, shown_name
from rekindle._src.models.loading.stored import beginnings, look, own_name
from rekindle._src.models.registry import config_from_hf, manifest
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


def test_keys_that_are_added_to_a_config_mean_nothing_in_a_file(tmp_path: Path) -> None:
    """A plain model could say that pictures have a billion levels, or that its head is missing."""
    raw = checkpoints.CASES["llama"]
    added = {"pictures": {"levels": 10**9, "x": 1}, "headless": True, "another_head": True, "nested_in": "x"}
    folder = checkpoints.write(tmp_path / "plain", raw)
    (folder / "config.json").write_text(json.dumps({**raw, **added}))
    assert config_from_hf(look(folder).raw) == config_from_hf(raw)
    folder = nested(tmp_path / "nested", raw, PREFIXES["model.language_model"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": {**raw, **added}}))
    assert config_from_hf(look(folder).raw) == config_from_hf({**raw, "dtype": "float32"})


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
    folder = nested(tmp_path / "nested", raw, {"model.layers.": "model.blocks."})
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


BEGINNINGS = (
    "model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.", "transformer.",
    "base_model.model.model.", "_orig_mod.model.", "",
)  # fmt: skip


def under(folder: Path, case: str, beginning: str, **more: np.ndarray[Any, Any]) -> Path:
    """Write the checkpoint of a case so that its tensors' names begin with `beginning`; `more` are further tensors."""
    raw = checkpoints.CASES[case]
    prefix = manifest(config_from_hf(raw)).prefix
    state = {
        beginning + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
        for name, tensor in checkpoints.tensors(raw).items()
    }
    return checkpoints.write(folder, raw, {**state, **more})


@pytest.mark.parametrize("case", ["llama", "qwen3.5-moe", "nemotron-h-experts-in-groups", "gpt2", "gemma4-moe"])
def test_names_begin_as_the_file_has_them(case: str, tmp_path: Path) -> None:
    """Releases of transformers, and tools that wrap a model, save it under other names; config.json says none of it."""
    raw = checkpoints.CASES[case]
    config = config_from_hf(raw)
    expected, _ = named(checkpoints.write(tmp_path / "plain", raw), config)
    for number, beginning in enumerate(BEGINNINGS):
        names, shown = named(under(tmp_path / str(number), case, beginning), config)
        assert names == expected, beginning
        assert shown == f"{beginning}layers.0.x" or case == "gpt2", beginning


def named(folder: Path, config: Any) -> tuple[list[str], str]:
    stored = look(folder)
    declared, entries = named_tensors(stored, config)
    return sorted(entries), shown_name(stored, config, declared, f"{declared.prefix}layers.0.x")


def test_heads_are_found_above_the_language_model() -> None:
    assert own_name("language_model.lm_head.weight", "language_model.model.") == "lm_head.weight"
    assert own_name("model.lm_head.qweight", "model.language_model.") == "lm_head.qweight"
    assert own_name("lm_head.weight", "") == "lm_head.weight"
    assert own_name("tower.lm_head.weight", "language_model.model.") is None
    assert own_name("language_lm_head.weight", "language_model.") is None
    assert own_name("mtp.layers.0.norm.weight", "") is None


def test_two_language_models_are_refused_by_their_names(tmp_path: Path) -> None:
    raw = checkpoints.CASES["llama"]
    twice = {f"draft.{name}": tensor for name, tensor in checkpoints.tensors(raw).items()}
    with pytest.raises(CheckpointError, match=r"holds 2 language models: .* begin with 'draft\.model\.', 'model\.'"):
        load(under(tmp_path / "two", "llama", "model.", **twice), dtype="float32")
    heads = {"language_model.lm_head.weight": np.ones((160, 48), np.float32)}
    shown = r"two tensors for lm_head\.weight: language_model\.lm_head\.weight and lm_head\.weight"
    with pytest.raises(CheckpointError, match=shown):
        load(under(tmp_path / "heads", "llama", "language_model.model.", **heads), dtype="float32")


def test_heads_that_draft_are_no_second_language_model() -> None:
    names = (
        "model.embed_tokens.weight", "model.layers.0.x.weight", "model.layers.9.embed_tokens.weight",
        "mtp.embed_tokens.weight", "mtp.layers.0.x.weight", "tower.encoder.layers.0.x.weight",
        "tower.embeddings.weight",
        "visual.embeddings.patch_embedding.weight", "visual.layers.0.x.weight",
    )  # fmt: skip
    assert beginnings(names) == ("model.",)


def test_differences_are_told_by_the_files_names(tmp_path: Path) -> None:
    raw = checkpoints.CASES["llama"]
    state = {name.replace("model.", "model.language_model.", 1): t for name, t in checkpoints.tensors(raw).items()}
    del state["model.language_model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing: model\.language_model\.norm\.weight"):
        load(checkpoints.write(tmp_path, raw, state), dtype="float32")


@pytest.mark.clock
def test_many_names_take_time_in_proportion() -> None:
    def seconds(count: int) -> float:
        names = [f"a{number}.layers.{number}.b.embed_tokens.c" for number in range(count)]
        start = time.process_time()
        beginnings(names)
        return time.process_time() - start

    few = statistics.median(seconds(4000) for _ in range(5))
    assert statistics.median(seconds(16_000) for _ in range(5)) < 12 * few + 0.05
