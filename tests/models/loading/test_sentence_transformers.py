"""The files of sentence-transformers: what is read of them, and how what is not implemented is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers import checkpoints, embedders, gguf_files
from rekindle._src.models.loading.sentence_transformers import embedder_of
from rekindle._src.models.registry import config_from_hf
from rekindle.errors import CheckpointError, UnsupportedModel

CONFIG = config_from_hf(embedders.CASES["gemma3"].raw)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedders.write(tmp_path_factory.mktemp("embedder"), "gemma3")


def test_it_reads_pooling_layers_and_prompts(written: Path) -> None:
    made = embedder_of(written, CONFIG)
    assert (made.pooling, made.normalize, made.size, made.alone) == ("mean", True, 48, True)
    assert made.prompts == embedders.PROMPTS and made.default_prompt == "document"
    (wide, narrow), states = made.projections, np.linspace(-1, 1, 48, dtype=np.float32)
    assert narrow.bias is not None and wide.bias is None
    expected = np.tanh(narrow.weight @ (wide.weight @ states) + narrow.bias)
    np.testing.assert_allclose(made.finish(states, None, normalize=False), expected, atol=1e-6)
    assert np.linalg.norm(made.finish(states, 8, normalize=True)) == pytest.approx(1.0, abs=1e-6)
    plain = embedder_of(None, CONFIG)
    assert (plain.pooling, plain.normalize, plain.size, plain.projections) == ("mean", True, 48, ())


def _change(path: str, **fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / path
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def _modules(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        change(modules)
        (folder / "modules.json").write_text(json.dumps(modules))

    return changed


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (_change("1_Pooling/config.json", pooling_mode="max"), UnsupportedModel, "pools by max. Implemented: one of"),
        (_change("1_Pooling/config.json", pooling_mode=["cls", "mean"]), UnsupportedModel, "pools by cls, mean"),
        (_change("1_Pooling/config.json", include_prompt=False), UnsupportedModel, "include_prompt"),
        (_change("1_Pooling/config.json", embedding_dimension=64), CheckpointError, "64 numbers, and the model has 48"),
        (_change("2_Dense/config.json", activation_function="my.Own"), UnsupportedModel, "activation_function my.Own"),
        (_change("2_Dense/config.json", use_residual=True), UnsupportedModel, "use_residual"),
        (_change("2_Dense/config.json", module_input_name="token_embeddings"), UnsupportedModel, "module_input_name"),
        (_change("2_Dense/config.json", out_features=95), CheckpointError, "linear layer from 48 to 95"),
        (_change("2_Dense/config.json", bias=True), CheckpointError, "linear layer from 48 to 96"),
        (_change("config_sentence_transformers.json", default_prompt_name="x"), CheckpointError, "no such prompt"),
        (_change("config_sentence_transformers.json", prompts=["x"]), CheckpointError, "prompts that are no object"),
        (lambda folder: (folder / "1_Pooling" / "config.json").write_text("{"), CheckpointError, "can't be read"),
        (lambda folder: (folder / "modules.json").write_text("{}"), CheckpointError, "holds a dict, not a list"),
        (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), CheckpointError, "has no"),
        (_modules(lambda all: all[1].update(type="x.WordWeights")), UnsupportedModel, "'WordWeights'"),
        (_modules(lambda all: all.pop(1)), UnsupportedModel, "'Dense'"),
        (_modules(lambda all: all.__delitem__(slice(1, None))), UnsupportedModel, "no module for pooling"),
        (_modules(lambda all: all.insert(2, all.pop())), UnsupportedModel, "in this order"),
        (_modules(lambda all: all[2].update(path="../elsewhere")), CheckpointError, "which is not in it"),
        (_modules(lambda all: all.append("x")), UnsupportedModel, "'x'"),
        (
            _modules(lambda all: all.__setitem__(slice(2, 4), all[2:4] * 9)),
            (UnsupportedModel, CheckpointError),
            "Dense",
        ),
        (_change("1_Pooling/config.json", pooling_mode=[["mean"]]), UnsupportedModel, "pools by ['mean']"),
        (_change("config_sentence_transformers.json", default_prompt_name=["x"]), CheckpointError, "no such prompt"),
    ],
)
def test_what_it_can_not_do_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], None], error: type[Exception], said: str
) -> None:
    folder = embedders.write(tmp_path / "model", "gemma3")
    change(folder)
    with pytest.raises(error) as raised:
        embedder_of(folder, CONFIG)
    assert said in str(raised.value) and str(folder) in str(raised.value)


@pytest.mark.parametrize(("number", "pooling"), [(None, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_a_gguf_file_says_how_it_pools(tmp_path: Path, number: int | None, pooling: str) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["qwen3"])
    metadata = {} if number is None else {"qwen3.pooling_type": number}
    file = gguf_files.convert(folder, tmp_path / "model.gguf", **metadata)
    assert embedder_of(file, config_from_hf(checkpoints.CASES["qwen3"])).pooling == pooling


def test_a_model_that_embeds_alone_is_no_gguf_file() -> None:
    from rekindle._src.models.loading.gguf.export import describe

    with pytest.raises(UnsupportedModel, match="can't be a GGUF file: it is for embeddings alone"):
        describe(CONFIG)


def test_a_layer_may_be_stored_in_16_bits(tmp_path: Path) -> None:
    folder = embedders.write(tmp_path, "gemma3")
    weight = np.random.default_rng(0).standard_normal((96, 48)).astype(np.float16)
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    np.testing.assert_array_equal(embedder_of(folder, CONFIG).projections[0].weight, weight.astype(np.float32))
