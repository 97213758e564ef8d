"""PEFT folders: which modules a config means, with which rank and scale, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers import adapters
from helpers.driving import tiny_model
from rekindle._src.models.adapters.reading import read_adapter
from rekindle.errors import CheckpointError

CONFIG = tiny_model().config


def changed(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def test_products_land_in_fused_matrices_with_their_scales(tmp_path: Path) -> None:
    folder = adapters.write(
        tmp_path, CONFIG, rank=4, lora_alpha=6, rank_pattern={"k_proj": 2}, alpha_pattern={r"layers.1.*.k_proj": 5}
    )
    state = load_file(folder / "adapter_model.safetensors")
    adapter = read_adapter(folder, "x", CONFIG)
    assert adapter.rank == 4 and len(adapter.products) == 2 * 4
    for layer, alpha in ((0, 6), (1, 5)):
        q, k, v = adapter.products[f"layers.{layer}.attention.qkv"]
        prefix = f"base_model.model.model.layers.{layer}.self_attn"
        for product, name, scale in ((q, "q_proj", 1.5), (k, "k_proj", alpha / 2), (v, "v_proj", 1.5)):
            assert product is not None
            np.testing.assert_array_equal(product.down, state[f"{prefix}.{name}.lora_A.weight"])
            expected = state[f"{prefix}.{name}.lora_B.weight"] * np.float32(scale)
            np.testing.assert_array_equal(product.up, expected)
    root = read_adapter(changed(folder, use_rslora=True), "x", CONFIG)
    assert root.digest != adapter.digest
    product = root.products["layers.0.attention.out"][0]
    assert product is not None
    ratio = product.up / state["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"]
    np.testing.assert_allclose(ratio, 3.0, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*\.(q_proj|down_proj)"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "mlp.down_proj"]},
        {"target_modules": ["q_proj", "down_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    ],
)
def test_targets_are_a_list_an_expression_or_all(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = adapters.write(tmp_path, CONFIG, targets=("q_proj", "down_proj"))
    adapter = read_adapter(changed(folder, **fields), "x", CONFIG)
    kinds = {path.partition(".")[2].partition(".")[2] for path in adapter.products}
    assert kinds == {"attention.qkv", "mlp.down"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora='True' is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "mlp.experts.down_proj: adapter_config.json names it"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"r": 5}, "have shapes"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "v_proj: adapter_config.json names it, and it has no"),
        ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight: adapter_config.json does not name its module"),
        ({"layers_to_transform": [0]}, "layers.1.self_attn.q_proj.lora_A.weight: adapter_config.json does not name"),
        ({"target_modules": "(", }, "not a regular expression"),
    ],
)  # fmt: skip
def test_what_is_not_done_or_does_not_fit_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    folder = changed(adapters.write(tmp_path, CONFIG, targets=("q_proj", "down_proj")), **fields)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, "x", CONFIG)
    assert words in str(caught.value)


def test_every_tensor_has_to_land(tmp_path: Path) -> None:
    folder = adapters.write(tmp_path, CONFIG)
    path = folder / "adapter_model.safetensors"
    state = load_file(path)
    extra = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    save_file({**state, extra: np.zeros((4, 32), np.float32)}, path)
    with pytest.raises(CheckpointError, match=r"layers\.9\.self_attn\.q_proj\.lora_A\.weight: is not a linear layer"):
        read_adapter(folder, "x", CONFIG)
    broken = dict(state)
    broken[next(iter(broken))][0, 0] = np.inf
    save_file(broken, path)
    with pytest.raises(CheckpointError, match="not finite"):
        read_adapter(folder, "x", CONFIG)
    path.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle can run any code"):
        read_adapter(folder, "x", CONFIG)
