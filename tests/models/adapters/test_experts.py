"""Adapters of experts: all of a layer in one tensor, or one of each, in files and in a session's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rekindle
from helpers import adapters, checkpoints
from helpers.thorough import by_default
from rekindle._src.models.adapters.adapted import merged
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.placement import random_model
from rekindle._src.models.registry import config_from_hf
from rekindle.errors import CheckpointError
from workshop import reference

BOTH = ("gate_up_proj", "down_proj")
CONFIG = config_from_hf(checkpoints.CASES["qwen3-moe"])
SPEC = next(spec for spec in CONFIG.moe if spec is not None)
COUNT, INNER, RANK = SPEC.num_experts, SPEC.intermediate_size, 4
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 6, "max_tokens_per_step": 64, "max_model_len": 64, "precompile": "lazy",
    "max_adapters": 2, "max_adapter_rank": 16, "disk_memory": 0, "seed": 0, "quiet": True,
}  # fmt: skip


def fused(folder: Path, **options: Any) -> Path:
    return adapters.write(folder, CONFIG, rank=RANK, targets=(), experts=BOTH, **options)


def single(folder: Path, source: Path) -> Path:
    """The same adapter with tensors of single experts, as older checkpoints have them."""
    state: dict[str, np.ndarray] = {}
    for name, tensor in load_file(source / "adapter_model.safetensors").items():
        if name.endswith("lora_B.weight"):
            continue
        module = name.removesuffix(".lora_A.weight").removesuffix(".base_layer")
        up = load_file(source / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
        ups, downs = up.reshape(len(up), RANK, COUNT), tensor.reshape(COUNT, RANK, -1)
        parts = {"gate_proj": slice(INNER), "up_proj": slice(INNER, None)} if ".base_layer" in name else {}
        for expert in range(COUNT):
            for part, rows in (parts or {"down_proj": slice(None)}).items():
                state[f"{module}.{expert}.{part}.lora_A.weight"] = downs[expert]
                state[f"{module}.{expert}.{part}.lora_B.weight"] = np.ascontiguousarray(ups[rows, :, expert])
    folder.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    config |= {"target_modules": ["gate_proj", "up_proj", "down_proj"], "target_parameters": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(state, folder / "adapter_model.safetensors")
    return folder


def test_one_tensor_of_all_experts_is_one_of_each(tmp_path: Path) -> None:
    folder = fused(tmp_path / "all")
    whole = read_adapter(folder, "x", CONFIG)
    assert read_adapter(single(tmp_path / "each", folder), "x", CONFIG).digest == whole.digest
    state = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.mlp.experts"
    product = whole.products["layers.0.mlp.down"][2]
    assert product is not None
    up = state[f"{prefix}.lora_B.weight"].reshape(-1, RANK, COUNT)[:, :, 2] * np.float32(2)
    delta = up @ state[f"{prefix}.lora_A.weight"][2 * RANK : 3 * RANK]
    np.testing.assert_allclose(product.up @ product.down, delta, rtol=1e-6)


def test_rows_of_gate_and_up_may_alternate(tmp_path: Path) -> None:
    config = config_from_hf(checkpoints.CASES["gpt-oss"])
    folder = adapters.write(tmp_path, config, rank=RANK, targets=(), experts=("gate_up_proj",))
    state = load_file(folder / "adapter_model.safetensors")
    spec = config.moe[0]
    assert spec is not None
    up = state["base_model.model.model.layers.0.mlp.experts.lora_B.weight"].reshape(-1, RANK, spec.num_experts)
    gate, above = read_adapter(folder, "x", config).products["layers.0.mlp.gate_up"][2:4]
    assert gate is not None and above is not None
    np.testing.assert_array_equal(gate.up, up[0::2, :, 1] * np.float32(2))
    np.testing.assert_array_equal(above.up, up[1::2, :, 1] * np.float32(2))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = fused(tmp_path / "a")
    path, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    state, raw = load_file(path), json.loads(config.read_text())
    prefix = "base_model.model.model.layers.0.mlp.experts"
    for fields, words in (
        ({"target_parameters": ["mlp.experts.down_proj"]}, r"experts\.base_layer: has shapes"),
        ({"r": 3}, r"layers\.0\.mlp\.experts: has shapes"),
        ({"target_parameters": [*raw["target_parameters"], "mlp.other"]}, r"mlp\.other: .* not a parameter"),
        ({"target_modules": ["q_proj"]}, r"q_proj: adapter_config.json names it"),
    ):
        config.write_text(json.dumps(raw | fields))
        with pytest.raises(CheckpointError, match=words):
            read_adapter(folder, "x", CONFIG)
    config.write_text(json.dumps(raw))
    save_file({name: array for name, array in state.items() if not name.startswith(f"{prefix}.lora")}, path)
    with pytest.raises(CheckpointError, match=r"down_proj: adapter_config.json names it.*in layer 0"):
        read_adapter(folder, "x", CONFIG)


@pytest.mark.thorough
def test_rows_with_and_without_them_share_a_batch(tmp_path: Path) -> None:
    model = checkpoints.case("qwen3-moe")
    experts, other = fused(tmp_path / "experts", seed=1), adapters.write(tmp_path / "other", CONFIG, seed=2)
    third = single(tmp_path / "single", fused(tmp_path / "third", seed=3))
    names = {"experts": experts, "other": other, "third": third, None: None}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 150, length).tolist() for length in (5, 30, 17, 9)]
    with rekindle.open_sync(model, **OPTIONS) as session:
        base = [session.generate_sync(ids, max_tokens=6, ignore_eos=True, logprobs=2) for ids in prompts]
        for name, folder in names.items():
            if name is not None:
                session.load_adapter(name, folder).result_sync()
        handles = [
            (name, ids, session.submit(ids, adapter=name, max_tokens=6, ignore_eos=True, logprobs=2))
            for ids in prompts
            for name in names
        ]
        texts = set()
        for name, ids, handle in handles:
            done = handle.result_sync()
            assert list(done.token_ids) == adapters.plain(model, names[name], ids, 6), name
            if ids is prompts[0]:
                texts.add(done.token_ids)
            if name is None:
                alone = base[prompts.index(ids)]
                assert done.token_ids == alone.token_ids
                np.testing.assert_allclose(
                    [entry.logprob for entry in done.logprobs],
                    [entry.logprob for entry in alone.logprobs],
                    rtol=1e-5,
                    atol=1e-5,
                )
        assert len(texts) == len(names), "the adapters change little"
        session.check_integrity()


@pytest.mark.parametrize("quantize", by_default(["int8", "int8-weight"], 0))
def test_quantised_experts_have_adapters_of_floats(tmp_path: Path, quantize: str) -> None:
    model, ids = random_model(CONFIG, quantize=quantize), [5, 9, 33, 7, 8]
    folder = fused(tmp_path / "a")
    zero = {
        name: array * np.float32("lora_A" in name)
        for name, array in load_file(single(tmp_path / "b", folder) / "adapter_model.safetensors").items()
    }
    with rekindle.open_sync(model, **OPTIONS, adapters={"own": folder, "zero": zero}) as session:
        handles = [session.submit(ids, adapter=name, max_tokens=6, ignore_eos=True) for name in ("own", "zero", None)]
        own, none, base = [handle.result_sync().token_ids for handle in handles]
    assert none == base != own


def test_experts_that_are_kept_as_bits_are_merged(tmp_path: Path) -> None:
    adapter = read_adapter(fused(tmp_path / "a"), "x", CONFIG)
    whole = random_model(CONFIG)
    half = random_model(CONFIG, dtype="bfloat16")
    path = "layers.0.mlp.gate_up.weight"
    index = whole.graph.paths.index(path)
    change = np.asarray(merged(whole, adapter).leaves[index]) - np.asarray(whole.leaves[index])
    bits, before = merged(half, adapter).leaves[index], half.leaves[index]
    assert bits.dtype == before.dtype
    values = [np.asarray(leaf).view(jnp.bfloat16).astype(np.float32) for leaf in (bits, before)]
    np.testing.assert_allclose(values[0] - values[1], change, atol=0.03)
    assert np.abs(change).max() > 0.3
    assert reference.generate(merged(whole, adapter), [5, 9], 4) != reference.generate(whole, [5, 9], 4)
