"""Adapters as GGUF files are those of the PEFT folders that they were converted from."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import adapters, checkpoints
from helpers.driving import tiny_model
from helpers.gguf_files import entry, pair, raw, text
from helpers.python import run_python
from helpers.real_checkpoints import llama_cpp_source
from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.adapters.writing import write_folder
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.gguf.blocks import BY_NAME
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf
from rekindle._src.models.loading.gguf.names import place
from rekindle._src.models.loading.gguf.rewrites import HeadOrder
from rekindle._src.models.loading.gguf.rows import paired_rows
from rekindle._src.models.registry import config_from_hf, gguf_form
from rekindle.errors import CheckpointError

CONFIG = tiny_model().config


def tiled(count: int, order: HeadOrder) -> np.ndarray:
    """Which of Hugging Face's rows or columns lies at each place: the first head of each group, the second, …"""
    heads = np.arange(count - order.first).reshape(order.groups, -1, order.size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(order.first), order.first + heads])


def convert(adapter: Adapter, file: Path, *, config: ModelConfig = CONFIG, extra: str = "", **changes: Any) -> Path:
    """The adapter as llama.cpp's converter writes it: a tensor for each matrix, rows of q and k in pairs."""
    form, arrays = gguf_form(config.model_type), {}
    for module, (site, index) in sites_of(config).by_module().items():
        product = adapter.products.get(site.path, (None,) * (index + 1))[index]
        if product is not None:
            where, down, up = place(f"{module}.weight", form), product.down, product.up
            layer, inner = module.removeprefix("model.layers.").split(".", 1)
            how = form.rewritten(config, int(layer), f"{inner}.weight")
            if how is not None and how.rows is not None:
                up = up[tiled(len(up), how.rows)]
            if how is not None and how.columns is not None:
                down = np.ascontiguousarray(down[:, tiled(down.shape[1], how.columns)])
            arrays[f"{where.name}.lora_a"] = down
            arrays[f"{where.name}.lora_b"] = (
                up[paired_rows(np.arange(len(up)), config.head_dim)] if where.paired else up
            ) / np.float32(2)
    if extra:
        arrays[extra] = np.zeros((2, 32), np.float32)
    metadata = {
        "general.architecture": form.architecture, "general.type": "adapter", "adapter.type": "lora",
        "adapter.lora.alpha": 8.0, **changes,
    }  # fmt: skip
    tensors = [OutgoingTensor(name, BY_NAME["F32"], array.shape) for name, array in arrays.items()]
    write_gguf(file, metadata, tensors, iter(arrays.values()))
    return file


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    folder = adapters.write(tmp_path_factory.mktemp("peft"), CONFIG, rank=4, targets=("q_proj", "v_proj", "down_proj"))
    return read_adapter(folder, "x", CONFIG)


def test_a_file_is_the_same_adapter(adapter: Adapter, tmp_path: Path) -> None:
    again = read_adapter(convert(adapter, tmp_path / "a.gguf"), "x", CONFIG)
    assert again.digest == adapter.digest


def test_heads_of_a_hybrid_lie_in_another_order(tmp_path: Path) -> None:
    config = config_from_hf(checkpoints.CASES["qwen3.5"])
    spec = next(spec for spec in config.states if spec is not None)
    assert spec.heads > spec.key_heads
    whole = read_adapter(adapters.write(tmp_path / "peft", config, rank=4), "x", config)
    again = read_adapter(convert(whole, tmp_path / "a.gguf", config=config), "x", config)
    assert again.digest == whole.digest


@pytest.mark.slow
def test_llama_cpps_own_converter_writes_the_same_adapter(tmp_path: Path) -> None:
    """The folders are one in PEFT's form and one that a session saved, as it does after a training."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    script, commands = llama_cpp_source() / "convert_lora_to_gguf.py", []
    cases = ("llama", "qwen3", "gemma2", "qwen3.5", "nemotron-h")
    for case in cases:
        raw = {**checkpoints.CASES[case], **({"mtp_num_hidden_layers": 1} if case == "qwen3.5" else {})}
        base = checkpoints.write(tmp_path / case / "base", raw)
        config = config_from_hf(checkpoints.CASES[case])
        adapter = read_adapter(adapters.write(tmp_path / case / "peft", config, rank=4), "x", config)
        write_folder(
            dataclasses.replace(adapter, trained_on="4 bits"), tmp_path / case / "saved", sites_of(config), "it"
        )
        commands += [
            ["", "--base", base, "--outfile", tmp_path / case / f"{name}.gguf", tmp_path / case / name]
            for name in ("peft", "saved")
        ]
    each = f"import runpy, sys\nsys.path.insert(0, {str(script.parent)!r})\n"  # one process, which imports torch once
    for command in commands:
        each += f"sys.argv = {[*map(str, command)]}\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
    run_python("-c", each)
    for case in cases:
        config, folder = config_from_hf(checkpoints.CASES[case]), tmp_path / case
        digests = {read_adapter(folder / name, "x", config).digest for name in ("peft", "peft.gguf", "saved.gguf")}
        assert len(digests) == 1, case


def test_what_does_not_fit_is_named(adapter: Adapter, tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"extra": "blk.0.nothing.lora_a"}, r"blk\.0\.nothing\.lora_a: is not a matrix"),
        ({"general.type": "model"}, "is not a LoRA"),
        ({"general.architecture": "qwen2"}, "and the model's is 'llama'"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, "invocation tokens are not supported"),
    )
    for changes, words in cases:
        file = convert(adapter, tmp_path / "b.gguf", **changes)
        with pytest.raises(CheckpointError, match=words):
            read_adapter(file, "x", CONFIG)
    config = config_from_hf(checkpoints.CASES["gpt2"])
    with pytest.raises(CheckpointError, match="adapters of gpt2 transposed"):
        read_adapter(convert(adapter, file, **{"general.architecture": "gpt2"}), "x", config)


def test_nothing_is_read_before_all_shapes_are_those_of_the_model(adapter: Adapter, tmp_path: Path) -> None:
    form = gguf_form(CONFIG.model_type)
    metadata = {"general.architecture": form.architecture, "general.type": "adapter", "adapter.type": "lora"}
    most = (8 << 30) // 4 // CONFIG.hidden_size
    rows = CONFIG.num_heads * CONFIG.head_dim
    cases = (
        ([most, CONFIG.hidden_size], [rows, 4], "have shapes"),
        ([most, CONFIG.hidden_size], [rows, most], "at most"),
    )
    for down, up, words in cases:
        shapes = {"blk.0.attn_q.weight.lora_a": down, "blk.0.attn_q.weight.lora_b": up}
        tensors, file = (
            [OutgoingTensor(name, BY_NAME["F32"], tuple(shape)) for name, shape in shapes.items()],
            tmp_path / "a.gguf",
        )
        pairs = [pair(key, 8, text(value)) for key, value in metadata.items()]
        entries, offset = [], 0
        for tensor in tensors:
            entries.append(entry(tensor.name, tensor.shape, 0, offset))
            offset += -(-4 * tensor.shape[0] * tensor.shape[1] // 32) * 32
        file.write_bytes(raw(pairs=pairs, entries=entries))
        os.truncate(file, file.stat().st_size + offset)  # a hole
        with pytest.raises(CheckpointError, match=words):
            read_adapter(file, "x", CONFIG, fits=lambda rank: pytest.fail("shapes come first"))
    whole = convert(adapter, file)
    with pytest.raises(CheckpointError, match="4 is too high"):
        read_adapter(whole, "x", CONFIG, fits=_none_fits)


def _none_fits(rank: int) -> None:
    raise CheckpointError(f"{rank} is too high")
