"""Counts in metadata and configs: no family believes one before it was compared with bounds and with what is there."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models import drafters, families
from rekindle._src.models.loading.gguf import source
from rekindle._src.models.loading.gguf.architecture import GgufModel
from rekindle._src.models.loading.gguf.blocks import BY_NAME
from rekindle._src.models.loading.gguf.header import GgufHeader, GgufTensor, Metadata
from rekindle._src.models.registry import config_from_hf, gguf_form, gguf_forms
from rekindle.errors import CheckpointError, UnsupportedModel

PATH, LAYERS = Path("model.gguf"), 4
SIZES = {
    "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 64,
    "rope.dimension_count": 8, "attention.key_length": 16, "attention.value_length": 16, "block_count": LAYERS,
    "attention.key_length_mla": 16, "expert_count": 0, "rope.scaling.type": "none",
}  # fmt: skip
MISSING = re.compile(r"has no (\S+) in its metadata \((?:a |an )?(whole number|number|array of numbers|string)")
USUAL: dict[str, Any] = {
    "whole number": 2, "number": 1.0, "string": "x", "array of numbers": np.array([1, 1, 1, 0], np.int32),
}  # fmt: skip
NAMES = [
    "token_embd.weight",
    *(f"blk.{layer}.{name}.weight" for layer in range(8) for name in ("attn_norm", "attn_q", "attn_v", "ffn_up")),
]  # fmt: skip


def model_of(model_type: str, **changes: Any) -> GgufModel:
    """The metadata of a file of this family with `changes`; keys that it needs besides are there."""
    prefix, sizes = gguf_form(model_type).architecture, SIZES | changes
    values: dict[str, Any] = {f"{prefix}.{key}": value for key, value in sizes.items() if value is not None}
    tensors = {name: GgufTensor(name, BY_NAME["F32"], (64, 64), 0, 64 * 64 * 4) for name in NAMES}
    for _ in range(40):
        model = GgufModel(GgufHeader(PATH, Metadata(PATH, values), tuple(tensors.values()), 0, b"", 0), prefix, tensors)
        try:
            gguf_form(model_type).variant(model)
            gguf_form(model_type).read(model)
        except CheckpointError as error:
            missing = MISSING.search(str(error))
            if missing is None:
                break
            values[missing[1]] = USUAL[missing[2]]
        else:
            break
    return model


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("count", [3_000_000, 1025, len(NAMES) + 1, 0, -1])
@pytest.mark.parametrize("model_type", gguf_forms())
def test_layers_are_bounded_by_what_is_there(model_type: str, count: int) -> None:
    model = model_of(model_type)
    values = {**model.metadata, f"{model.prefix}.block_count": count}
    model = model._replace(header=model.header._replace(metadata=Metadata(PATH, values)))

    def read_all() -> None:
        gguf_form(model_type).variant(model)
        gguf_form(model_type).read(model)

    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"block_count={count} is not from 1 to 1,024"):
        read_all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, f"{peak:,} bytes were allocated"


@pytest.mark.parametrize("model_type", by_default(list(gguf_forms()), 8))
@pytest.mark.parametrize("count", [-3_000_000, LAYERS, 1 << 62])
def test_layers_that_draft_tokens_are_fewer_than_all(model_type: str, count: int) -> None:
    model = model_of(model_type)
    values = {**model.metadata, f"{model.prefix}.nextn_predict_layers": count}
    model = model._replace(header=model.header._replace(metadata=Metadata(PATH, values)))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"nextn_predict_layers={count} is not less than its 4 layers"):
        gguf_form(model_type).read(model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("model_type", sorted({*gguf_forms()} - {"gemma4_text"}))  # it also reads a tensor
def test_layers_that_draft_tokens_are_none_of_the_models(model_type: str) -> None:
    blocks = LAYERS + 2
    model = model_of(model_type, block_count=blocks, nextn_predict_layers=2)
    values = {
        key: np.resize(value, blocks) if isinstance(value, np.ndarray) and value.size == LAYERS else value
        for key, value in model.metadata.items()
    }
    model = model._replace(header=model.header._replace(metadata=Metadata(PATH, values)))
    gguf_form(model_type).variant(model)
    keys = gguf_form(model_type).read(model)
    assert keys.get("num_hidden_layers", keys.get("n_layer")) == LAYERS
    assert all(len(value) == LAYERS for key, value in keys.items() if key.endswith("layer_types"))


@pytest.mark.parametrize("model_type", by_default(list(gguf_forms()), 8))
def test_any_number_is_taken_or_refused_by_a_typed_error(model_type: str) -> None:
    """Families divide by sizes, and take roots of them."""
    refused = 0
    for key in SIZES:
        for value in (0, -1, 3, 1 << 62, float("nan"), float("inf"), 1e-45, "text", np.array([0, 0, 0, 0], np.int32)):
            model = model_of(model_type)
            values = dict(model.metadata) | {"general.architecture": model.prefix, f"{model.prefix}.{key}": value}
            header = model.header._replace(metadata=Metadata(PATH, values))
            try:
                config_from_hf(source.config(header, dict(model.tensors)))
            except CheckpointError:
                refused += 1
    assert refused > 20


def test_a_number_for_each_layer_is_that_many_numbers() -> None:
    model = model_of("lfm2", **{"attention.head_count_kv": np.ones(3_000_000, np.int8)})
    with pytest.raises(UnsupportedModel, match="3,000,000 numbers' is not implemented for 4 layers"):
        model.attends()


@pytest.mark.parametrize("values", [np.ones(65, np.int32), np.ones(3, np.float32)], ids=["many", "floats"])
def test_a_list_is_of_a_few_integers(values: np.ndarray) -> None:
    assert model_of("eagle3", target_layers=np.array([2, 9, 13], np.int32)).listed("target_layers") == [2, 9, 13]
    with pytest.raises(UnsupportedModel, match="numbers' is not implemented where up to 64 integers are"):
        model_of("eagle3", target_layers=values).listed("target_layers")


@pytest.mark.parametrize("key", ["block_count", "nextn_predict_layers"])
def test_families_have_no_other_way_to_these_counts(key: str) -> None:
    model = model_of("llama")
    for read in (model.integer, model.number, model.get, model.numbers):
        with pytest.raises(AssertionError, match="is read by GgufModel"):
            read(key)
    for path in (path for room in (families, drafters) for path in Path(*room.__path__).glob("*.py")):
        source = path.read_text()
        assert ".metadata" not in source, f"{path.name} reads metadata past GgufModel"
        assert f'"{key}"' not in source, path.name


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("deepseek-v2", {"n_shared_experts": ["x"] * 1000}, "n_shared_experts="),
        ("deepseek-v2", {"n_shared_experts": "x" * 1000}, "n_shared_experts='xxx"),
        ("deepseek-v2", {"n_routed_experts": 5000}, "n_routed_experts=5000"),
        (
            "gemma4-shared-pages-and-embeddings-of-layers",
            {"num_kv_shared_layers": -(10**9)},
            "num_kv_shared_layers=-1000000000",
        ),
        ("lfm2-adjusted", {"block_ffn_dim_multiplier": "1" * 1000}, "block_ffn_dim_multiplier"),
        ("granite4", {"mamba_expand": "1" * 1000}, "mamba_expand='111"),
        ("nemotron-h", {"hybrid_override_pattern": "M*" * 3000, "layers_block_type": None}, "num_hidden_layers=6000"),
        ("glm4-moe-lite", {"mlp_layer_types": ["sparse"] * 3000}, "mlp_layer_types has 3000 entries for"),
        ("qwen3-moe", {"num_hidden_layers": 1000, "num_experts": 4000}, "describes 4,000,000 experts"),
    ],
)
def test_counts_of_a_config_are_bounded_before_anything_is_made_of_them(
    case: str, change: dict[str, Any], named: str
) -> None:
    raw = {key: value for key, value in (checkpoints.CASES[case] | change).items() if value is not None}
    tracemalloc.start()
    with pytest.raises(UnsupportedModel, match=named) as caught:
        config_from_hf(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, f"{peak:,} bytes were allocated"
    assert len(str(caught.value)) < 500
