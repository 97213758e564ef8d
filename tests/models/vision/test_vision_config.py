"""The numbers of encoders in a stranger's config.json: typed, bounded, and with transformers' defaults."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from helpers.bounds import Within
from helpers.towers import MODELS, QWEN
from rekindle._src.models.vision.registry import MODULES, tower_family, vision_config
from rekindle.errors import UnsupportedModel


def changed(name: str, **keys: Any) -> dict[str, Any]:
    """The config of a small model with other values in its vision_config."""
    model = copy.deepcopy(MODELS[name])
    model["vision_config"] |= keys
    return model


def test_every_model_type_has_an_encoder_and_a_form_as_a_file() -> None:
    for name in MODULES:
        entry = tower_family(name)
        assert entry.mmproj is not None
        assert entry.config.__module__.rpartition(".")[2] == MODULES[name]
    assert {model["model_type"] for model in MODELS.values()} <= set(MODULES)


def test_a_model_without_pictures_has_none() -> None:
    assert vision_config({"model_type": "llama"}) is None
    assert vision_config({"model_type": "gemma3", "vision_config": None}) is None
    with pytest.raises(UnsupportedModel, match="pictures are not implemented for model_type='llava'"):
        vision_config({"model_type": "llava", "vision_config": {}})


def test_transformers_defaults_are_filled_in() -> None:
    """Published files leave out what is a default: SmolVLM's has no number of layers."""
    smol = vision_config(
        {
            "model_type": "smolvlm",
            "text_config": {"hidden_size": 960},
            "vision_config": {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16},
        }
    )
    assert smol is not None
    assert (smol.num_layers, smol.intermediate_size, smol.positions, smol.merge) == (12, 3072, 1024, 2)
    qwen = vision_config({"model_type": "qwen3_vl", "vision_config": {}})
    assert qwen is not None
    assert (qwen.num_layers, qwen.side, qwen.deepstack, qwen.patch_length) == (27, 48, (8, 16, 24), 1536)
    other = vision_config({"model_type": "qwen3_5", "vision_config": {"num_attention_heads": 8}})
    assert other is not None
    assert (other.num_heads, other.deepstack) == (8, ())


@pytest.mark.parametrize("value", [0, -1, 1 << 40, 10**400, 2.0, "16", True, [16, 16], {}, float("nan")])
def test_sizes_are_whole_numbers_within_bounds(value: Any, within: Within) -> None:
    for name, key in (
        ("qwen3_vl", "depth"), ("qwen3_vl", "patch_size"), ("qwen3_vl", "spatial_merge_size"),
        ("qwen3_vl", "temporal_patch_size"), ("qwen3_vl", "num_position_embeddings"), ("qwen3_vl", "out_hidden_size"),
        ("gemma4", "head_dim"), ("gemma4", "position_embedding_size"), ("gemma4", "pooling_kernel_size"),
        ("gemma4_unified", "mm_embed_dim"), ("gemma4_unified", "mm_posemb_size"), ("smolvlm", "image_size"),
        ("smolvlm", "num_attention_heads"), ("gemma3", "num_hidden_layers"), ("lfm2_vl", "num_patches"),
        ("lfm2_vl", "intermediate_size"), ("lfm2_vl", "hidden_size"), ("lfm2_vl", "num_channels"),
    ):  # fmt: skip
        with within(1), pytest.raises(UnsupportedModel, match=key) as raised:
            vision_config(changed(name, **{key: value}))
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen3_vl", {"num_heads": 3}, "num_heads=3, which is not a divisor of 32"),
        ("qwen3_vl", {"num_heads": 16}, "multiples of 4, which are rotated"),
        ("qwen3_vl", {"num_position_embeddings": 35}, "not the square"),
        ("qwen3_vl", {"deepstack_visual_indexes": [2, 0]}, "ascending"),
        ("qwen3_vl", {"deepstack_visual_indexes": [3]}, "ascending numbers of its 3 layers"),
        ("qwen3_vl", {"deepstack_visual_indexes": [True]}, "ascending"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0] * 10**6}, "ascending"),
        ("qwen3_vl", {"deepstack_visual_indexes": "0"}, "ascending"),
        ("qwen3_vl", {"hidden_act": "tanh"}, "hidden_act='tanh'"),
        ("qwen3_vl", {"rope_parameters": {"rope_theta": 0}}, "rope_theta=0"),
        ("qwen3_vl", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ("qwen3_vl", {"rope_parameters": [1]}, "rope_parameters"),
        ("qwen3_vl", {"patch_size": 4096, "in_channels": 16}, "patches of"),
        ("qwen3_vl", {"num_attention_heads": 4}, "two names of one key"),
        ("gemma4", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ("gemma4", {"head_dim": 18}, "head_dim=18"),
        ("gemma4", {"head_dim": 1 << 16}, "heads of 65,536 numbers"),
        ("gemma4", {"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ("gemma4", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ("gemma4", {"use_clipped_linears": "no"}, "use_clipped_linears='no'"),
        ("gemma4_unified", {"output_proj_dims": 31}, "output_proj_dims=31"),
        ("gemma4_unified", {"patch_size": 4000}, "patch_size=4000"),
        ("smolvlm", {"image_size": 3}, "image_size=3"),
        ("gemma3", {"image_size": 28}, "mm_tokens_per_image=9"),
    ],
)
def test_numbers_that_do_not_go_together(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        vision_config(changed(name, **keys))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gemma3", {"mm_tokens_per_image": 10**9}, "mm_tokens_per_image"),
        ("gemma3", {"mm_tokens_per_image": 8}, "is not a square"),
        ("smolvlm", {"scale_factor": "2"}, "scale_factor='2'"),
        ("lfm2_vl", {"projector_hidden_size": 1 << 23}, "projector_hidden_size=8,388,608"),
        ("lfm2_vl", {"projector_bias": "x"}, "projector_bias='x'"),
        ("lfm2_vl", {"vision_feature_layer": -2}, "vision_feature_layer=-2"),
        ("smolvlm", {"text_config": {}}, "hidden_size"),
        ("smolvlm", {"vision_config": [1]}, "vision_config is list"),
    ],
)
def test_numbers_of_the_whole_model(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        vision_config({**MODELS[name], **keys})


def test_the_language_models_size_has_to_be_the_projectors() -> None:
    model = {"model_type": "qwen3_5", "vision_config": QWEN}
    config = vision_config(model, out_size=24)
    assert config is not None and config.out_size == 24
    with pytest.raises(UnsupportedModel, match="embeddings of 24 numbers, and its language model has 25"):
        vision_config(model, out_size=25)
