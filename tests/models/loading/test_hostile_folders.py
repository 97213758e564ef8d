"""Checkpoints that are meant to hurt: a typed, short error at once, before anything is allocated for them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints
from helpers import transformers_versions as versions
from helpers.bounds import Within
from rekindle._src.models.loading import checkpoint, tensor_files
from rekindle._src.models.registry import FAMILIES, config_from_hf
from rekindle._src.text import ChatTemplate, Tokenizer
from rekindle.errors import CheckpointError, UnsupportedModel

RAW = checkpoints.CASES["llama"]
MOE = checkpoints.CASES["qwen3-moe"]


def quickly(call: Callable[[], Any], seconds: float = 20.0) -> BaseException | None:
    """What `call` raises. A call that hangs fails the test instead of stopping it."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert raised, f"still running after {seconds} s"
    return raised[0]


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ("llama", {"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
        ("llama", {"hidden_size": 10**12}, "hidden_size"),
        ("llama", {"hidden_size": "48"}, "hidden_size='48'"),
        ("llama", {"hidden_size": 48.5}, r"hidden_size=48\.5"),
        ("llama", {"vocab_size": 0}, "vocab_size=0"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads=0"),
        ("llama", {"num_key_value_heads": 10**9}, "num_key_value_heads"),
        ("llama", {"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta"),
        ("llama", {"rope_theta": "much"}, "much"),
        ("llama", {"rope_scaling": 7}, "rope_scaling=7"),
        ("llama", {"model_type": ["llama"]}, "model_type"),
        ("llama", {"quantization_config": "gptq"}, "quantization_config"),
        ("phi3", {"partial_rotary_factor": 1e9}, "partial_rotary_factor"),
        ("qwen3-moe", {"num_experts": 10**8}, "num_experts=100000000"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("mixtral", {"num_local_experts": 10**8}, "num_local_experts"),
        ("mistral-window", {"sliding_window": "wide"}, "sliding_window='wide'"),
        ("gpt2", {"n_layer": 10**9}, "n_layer"),
        ("gpt2", {"n_embd": 47}, "n_embd=47 is not a multiple of n_head"),
    ],
)
def test_hostile_numbers_are_refused_at_once(case: str, change: dict[str, Any], named: str) -> None:
    error = quickly(lambda: config_from_hf(checkpoints.CASES[case] | change))
    assert isinstance(error, UnsupportedModel)
    with pytest.raises(UnsupportedModel, match=named):
        raise error
    assert len(str(error)) < 400 + len(", ".join(FAMILIES))


SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner",
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_decides_shapes_has_no_default(model_type: str) -> None:
    raw = checkpoints.OF_FAMILY[model_type][0]
    implied = checkpoints.FAMILY_CASES[model_type].implied
    for name in (SIZES & set(raw)) - implied:
        with pytest.raises(UnsupportedModel, match=name):
            config_from_hf({key: value for key, value in raw.items() if key != name})


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral", "gpt2"])
def test_a_key_may_have_the_other_name_that_transformers_gives_it(case: str) -> None:
    raw = checkpoints.CASES[case]
    pairs = [("num_experts", "num_local_experts"), ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"),
             ("num_attention_heads", "n_head"), ("max_position_embeddings", "n_positions")]  # fmt: skip
    for pair in pairs:
        for name, other in (pair, pair[::-1]):
            if name in raw and not (case != "gpt2" and name != "num_experts" and name != "num_local_experts"):
                renamed = {other if key == name else key: value for key, value in raw.items()}
                assert config_from_hf(renamed) == config_from_hf(raw)
                with pytest.raises(UnsupportedModel, match=f"{pair[0]}.*{pair[1]}.*two names"):
                    config_from_hf({**raw, other: raw[name] + 1})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_aliases_are_those_of_transformers(model_type: str) -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    from rekindle._src.models.registry import family

    checkpoints.needs_transformers({"model_type": model_type})
    config = auto.CONFIG_MAPPING[model_type]
    theirs = {
        frozenset(pair) for pair in config.attribute_map.items()
        if not pair[0].endswith("_token_id") and not isinstance(getattr(config, pair[1], None), property)
    }  # fmt: skip
    ours = {*map(frozenset, family(model_type).aliases.items())}
    newest = versions.release(importlib.metadata.version("transformers")) >= (5, 23)  # others know fewer
    assert theirs == ours if newest else theirs <= ours, "a key has two names, whichever is first"


def test_more_layers_or_experts_than_tensors_is_told_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "abstract_model", None)  # calling it would be a TypeError
    for name, raw, change, told in (
        ("layers", RAW, {"num_hidden_layers": 1000}, "1,000 layers"),
        ("experts", MOE, {"num_experts": 4000}, "8,000 experts"),
    ):
        folder = checkpoints.write(tmp_path / name, raw)
        (folder / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(CheckpointError, match=told):
            checkpoint.load(folder)


def test_the_weights_are_compared_before_anything_is_made_for_them(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, RAW)
    (folder / "config.json").write_text(json.dumps(RAW | {"intermediate_size": 1 << 24}))
    with pytest.raises(CheckpointError, match=r"expected \[16777216, 48\]"):
        checkpoint.describe(folder)


@pytest.mark.thorough
def test_hundreds_of_thousands_of_surplus_tensors_are_one_short_error(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, RAW)
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header |= {
        f"surplus.{i}.{'x' * 220}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)
    }
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"100,000 differences.*unexpected: surplus.* and 99,988 more") as caught:
        checkpoint.load(folder)
    assert len(str(caught.value)) < tensor_files.MOST_LISTED * 220 + 500
    assert time.perf_counter() - start < 60


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no FIFOs")
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
     "generation_config.json", "chat_template.jinja"],
)  # fmt: skip
def test_a_fifo_is_refused_instead_of_waited_for(tmp_path: Path, name: str) -> None:
    folder = checkpoints.write(tmp_path, RAW)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)

    def open_everything() -> None:
        checkpoint.load(folder)
        Tokenizer.load(folder)
        ChatTemplate.load(folder)

    error = quickly(open_everything)
    assert isinstance(error, CheckpointError) and name in str(error)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_a_million_values_in_few_bytes_are_refused_before_they_are_made(tmp_path: Path, name: str) -> None:
    """Three bytes of a header became an object of 80: 100 MB of empty lists took 2.4 GB."""
    text = b'{"a":[' + b"[]," * (tensor_files.MAX_VALUES // 2) + b"[]]}"
    path = tmp_path / name
    path.write_bytes(text if name.endswith(".json") else len(text).to_bytes(8, "little") + text)
    read = {
        "config.json": lambda: tensor_files.read_json(path, dict, 1 << 30),
        "model.safetensors.index.json": lambda: tensor_files.weight_files(tmp_path),
        "model.safetensors": lambda: tensor_files.read_header(path),
    }
    with pytest.raises(CheckpointError, match=r"more than 4,194,304 values"):
        read[name]()


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b.safetensors", "C:x.safetensors", 7]
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, file: object) -> None:
    folder = checkpoints.write(tmp_path / "model", RAW, shards=2)
    checkpoints.write(tmp_path / "other", RAW)
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match=r"index\.json names files outside of its folder"):
        checkpoint.load(folder)


def test_a_huge_or_deeply_nested_config_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, RAW)
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json can't be read"):
        checkpoint.load(folder)
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"config\.json can't be read.*at most"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("a", [10**18] * 100_000, "100,000 dimensions, and at most 8 are read"),
        ("a" * 100_000, [1], "a name of 100,000 characters, 'aaaa"),
    ],
)
def test_a_tensor_without_bounds_is_refused_at_once(
    tmp_path: Path, within: Within, name: str, shape: list[int], words: str
) -> None:
    """A product of that many numbers took 20 s, and patterns read names."""
    raw = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
    with within(2), pytest.raises(CheckpointError, match=words) as caught:
        tensor_files.read_header(tmp_path / "model.safetensors")
    assert len(str(caught.value)) < 1_000


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """A file of one megabyte described 1,024 layers over the same bytes, which took a gigabyte of memory."""
    names = {
        f"model.layers.{layer}.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for layer in (0, 1)
    }
    for header, words in (
        (names, "model.layers.1.weight lies on model.layers.0.weight"),
        (
            {"a": names["model.layers.0.weight"], "b": {"dtype": "U8", "shape": [1], "data_offsets": [15, 16]}},
            "b lies on a",
        ),
    ):
        raw = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
        with pytest.raises(CheckpointError, match=words):
            tensor_files.read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("bound", "most"), [("_MAX_HEADER", 1 << 16), ("MAX_VALUES", 3_000)])
def test_the_files_of_a_model_share_the_bounds_of_one_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    """One small file may have many names, as in the hub's cache, where they are links to it."""
    folder = checkpoints.write(tmp_path / "model", RAW)
    fields = {
        f"tensor.{number}": {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]} for number in range(100)
    }
    header = json.dumps(fields).encode()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    first = folder / "model-0.safetensors"
    first.write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    monkeypatch.setattr(tensor_files, bound, most)
    assert len(tensor_files.read_headers([first, first])) == 2
    for number in range(1, 40):
        (folder / f"model-{number}.safetensors").hardlink_to(first)
    with pytest.raises(CheckpointError, match=r"model-\d+\.safetensors.*(at most [\d,]+ are read|more than)"):
        checkpoint.inspect(folder)
