"""config_from_hf: what it takes from a config.json, and what it refuses by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.base import abstract_model, merge
from rekindle._src.models.hf_config import ConfigKeys
from rekindle._src.models.placement import random_model
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import FAMILIES, config_from_hf, family, manifest
from rekindle.errors import UnsupportedModel

LLAMA = checkpoints.CASES["llama"]


@pytest.mark.parametrize("name", by_default(checkpoints.CASES, lambda name: name in checkpoints.ONE_EACH.values()))
def test_every_parameter_has_a_source_and_every_source_a_parameter(name: str) -> None:
    config = config_from_hf(checkpoints.CASES[name])
    graph, shapes = abstract_model(config)
    sources = manifest(config).sources
    assert set(sources) == set(graph.paths)
    for path, leaf in zip(graph.paths, shapes, strict=True):
        covered = np.zeros(leaf.shape, int)
        for part in sources[path].parts(leaf.shape):
            covered[part.place] += 1
        assert (covered == 1).all(), f"{path} is not filled exactly once"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_familys_reader_and_module_stand_together(model_type: str) -> None:
    case = checkpoints.OF_FAMILY[model_type][0]
    found = family(model_type)
    assert found.architecture == case["architectures"][0]
    assert found.config(ConfigKeys(case)).model_type == model_type
    assert found.module(found.config(ConfigKeys(case)), Precision.of("float32")).config.model_type == model_type


def test_configs_are_hashable_and_have_a_stable_digest() -> None:
    config = config_from_hf(LLAMA)
    assert hash(config) == hash(config_from_hf(dict(reversed(LLAMA.items()))))
    assert config.digest() == config_from_hf(LLAMA).digest()
    assert config.digest() != dataclasses.replace(config, norm_eps=1e-5).digest()


def test_graphs_of_equal_configs_are_equal() -> None:
    config = config_from_hf(LLAMA)
    one, two = abstract_model(config)[0], abstract_model(config_from_hf(LLAMA))[0]
    assert one == two and hash(one) == hash(two)
    assert one != abstract_model(config, "bfloat16")[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
    ],
)
def test_old_and_new_ways_to_write_rope_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert config_from_hf(LLAMA | old) == config_from_hf(LLAMA | new)


def test_gemma3_reads_old_and_new_ropes_alike() -> None:
    base = checkpoints.CASES["gemma3"]
    old = base | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = base | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    }
    assert config_from_hf(old) == config_from_hf(new)
    assert [rope.theta for rope in config_from_hf(old).ropes] == [5e3, 1e6]


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("llama", {"model_type": "mamba"}, "mamba"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("llama", {"rope_scaling": {"rope_type": "mrope", "mrope_section": [1]}}, "mrope"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "bits=None"),
        ("llama", {"quantization_config": {"quant_method": "quip"}}, "quip"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3.5", {"linear_num_value_heads": 3}, "3 heads of values can't share 2 heads of keys"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("granite4", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("ling3", {"use_mla_nope": True}, "use_mla_nope=True"),
        ("ling3", {"use_qkv_bias": True}, "use_qkv_bias=True"),
        ("ling3", {"rope_interleave": False}, "rope_interleave=False"),
        ("ling3", {"expert_swiglu_limit_list": [0, 7.0]}, "expert_swiglu_limit_list"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("deepseek-v2-groups", {"num_experts_per_tok": 5}, "more than the 4 experts to choose from"),
        ("ernie4.5-moe", {"moe_norm_min": 0.6}, "moe_norm_min"),
        ("falcon-h1", {"mamba_conv_bias": False}, "mamba_conv_bias=False"),
        ("falcon-h1", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("nemotron-h", {"hybrid_override_pattern": "M-M-M"}, "no attention"),
        ("nemotron-h", {"hybrid_override_pattern": "M-X*"}, "layer_types has 'X'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        (
            "phi3-longrope-short",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_",
        ),
    ],
)
def test_what_is_not_implemented_is_named(case: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        config_from_hf(checkpoints.CASES[case] | change)


def test_transformers_saves_the_heads_of_ling_under_another_name() -> None:
    raw = checkpoints.CASES["ling3"]
    saved = raw | {"head_dim": raw["qk_rope_head_dim"], "linear_head_dim": raw["head_dim"]}
    assert raw["head_dim"] != raw["qk_rope_head_dim"]
    assert config_from_hf(saved) == config_from_hf(raw)


def test_end_of_sequence_may_be_several_tokens_or_none() -> None:
    for value, expected in ((7, (7,)), ([7, 9], (7, 9)), (None, ())):
        assert config_from_hf(LLAMA | {"eos_token_id": value}).eos_token_ids == expected


def test_windows_land_on_the_right_layers() -> None:
    def windows(case: str) -> list[int | None]:
        return [spec.sliding_window for spec in config_from_hf(checkpoints.CASES[case]).attention]

    assert windows("mistral-window") == [8, 8]
    assert windows("qwen2-window") == [None, 8]
    assert windows("gemma2") == [8, None]
    assert windows("gemma3") == [8, 8, None]
    assert windows("smollm3-window") == [None, 8]


def test_prompts_past_the_original_length_are_another_regime() -> None:
    longrope = config_from_hf(checkpoints.CASES["phi3-longrope-crossing"])
    dynamic = config_from_hf(checkpoints.CASES["llama-dynamic-rope-crossing"])
    assert [longrope.rope_regime(length) for length in (48, 49, 60)] == [0, 1, 1]
    assert [dynamic.rope_regime(length) for length in (48, 49, 60)] == [0, 49, 60]
    assert config_from_hf(LLAMA).rope_regime(10**6) == 0


@pytest.mark.parametrize(("quantize", "factor"), [("int8", 1), ("int8-weight", 1), (None, 4)])
def test_quantised_models_have_a_scale_beside_each_matrix(quantize: str | None, factor: int) -> None:
    model = random_model(config_from_hf(LLAMA), quantize=quantize)
    sizes = dict(zip(model.graph.paths, model.leaves, strict=True))
    assert sizes["layers.0.mlp.down.weight"].nbytes == 48 * 80 * factor
    assert ("layers.0.mlp.down.scale" in sizes) == (quantize is not None)
    assert ("embed.scale" in sizes) == (quantize is not None)
    kept = random_model(config_from_hf(LLAMA), quantize=quantize, quantize_embeddings=False)
    assert not {"embed.scale", "head.scale"} & set(kept.graph.paths)


def test_activations_are_float32_on_cpu_and_follow_the_weights_elsewhere() -> None:
    assert Precision.of("bfloat16", platform="cpu").stream == "float32"
    assert Precision.of("bfloat16", platform="cuda").stream == "bfloat16"
    config = config_from_hf(LLAMA)
    model = random_model(config, dtype="bfloat16")
    tokens = jnp.arange(4)
    hidden = jax.eval_shape(
        lambda leaves: merge(model.graph, leaves)(tokens, tokens, lambda layer, q, k, v: q), model.leaves
    )
    assert hidden.dtype == jnp.float32
