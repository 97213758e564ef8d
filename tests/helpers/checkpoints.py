"""Tiny random checkpoints of every family, as Hugging Face folders or in memory, with and without torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from rekindle._src.models import LoadedModel, abstract_model, config_from_hf, manifest
from rekindle._src.models.loading.manifest import assemble

Tensors = dict[str, NDArray[Any]]

_SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def _case(model_type: str, architecture: str, **options: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **_SIZES, **options}


def _llama(**options: Any) -> dict[str, Any]:
    return _case("llama", "LlamaForCausalLM", **options)


def _scaled(kind: str, **options: Any) -> dict[str, Any]:
    return _llama(rope_theta=10000.0, rope_scaling={"rope_type": kind, "factor": 4.0, **options})


def _phi3(**options: Any) -> dict[str, Any]:
    return _case("phi3", "Phi3ForCausalLM", **options)


def _longrope(frequencies: int, original: int, **options: Any) -> dict[str, Any]:
    short = [1.0 + 0.1 * i for i in range(frequencies)]
    long = [2.0 + 1.5 * i for i in range(frequencies)]
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    return _phi3(rope_scaling=scaling, original_max_position_embeddings=original, **options)


def _gpt2(**options: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 160, "n_embd": 48, "n_layer": 2,
        "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2, **options,
    }  # fmt: skip


_MOE = {"num_experts_per_tok": 2, "head_dim": 12}
_QWEN3_MOE = {"num_experts": 6, "moe_intermediate_size": 40, **_MOE}
_GEMMA = {
    "head_dim": 16, "query_pre_attn_scalar": 2, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA3 = {**_GEMMA, "num_hidden_layers": 3, "sliding_window": 8, "sliding_window_pattern": 3}

# What each case is there for stands in its name. The prompts of the parity tests have 24 tokens, 64 more are generated.
CASES: dict[str, dict[str, Any]] = {
    "llama": _llama(),
    "llama-mha-tied": _llama(num_key_value_heads=6, tie_word_embeddings=True),
    "llama-mqa-five-heads": _llama(hidden_size=60, num_attention_heads=5, num_key_value_heads=1),
    "llama-wide-heads": _llama(head_dim=20),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True),
    "llama-linear-rope": _scaled("linear"),
    "llama-dynamic-rope-past-length": _scaled("dynamic") | {"max_position_embeddings": 16},
    "llama-dynamic-rope-crossing": _scaled("dynamic") | {"max_position_embeddings": 48},
    "llama3-rope": _scaled("llama3", original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
    "llama-yarn": _scaled("yarn", original_max_position_embeddings=16),
    "llama-yarn-mscale": _scaled(
        "yarn", original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3, truncate=False, beta_fast=4.0
    ),
    "smollm2": _llama(hidden_size=54, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "mistral-window": _case("mistral", "MistralForCausalLM", sliding_window=8, head_dim=12),
    "mistral-no-window": _case("mistral", "MistralForCausalLM", sliding_window=None),
    "mixtral": _case("mixtral", "MixtralForCausalLM", num_local_experts=4, **_MOE),
    "mixtral-window": _case("mixtral", "MixtralForCausalLM", num_local_experts=3, sliding_window=8, **_MOE),
    "qwen2": _case("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2-window": _case(
        "qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3": _case("qwen3", "Qwen3ForCausalLM", head_dim=12, tie_word_embeddings=True),
    "qwen3-biases": _case("qwen3", "Qwen3ForCausalLM", head_dim=12, attention_bias=True),
    "qwen3-moe": _case("qwen3_moe", "Qwen3MoeForCausalLM", norm_topk_prob=True, **_QWEN3_MOE),
    "qwen3-moe-dense-layer": _case("qwen3_moe", "Qwen3MoeForCausalLM", mlp_only_layers=[0], **_QWEN3_MOE),
    "gemma2": _case(
        "gemma2", "Gemma2ForCausalLM", sliding_window=8, attn_logit_softcapping=6.0, final_logit_softcapping=0.5,
        **_GEMMA,
    ),
    "gemma2-no-caps": _case(
        "gemma2", "Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None, **_GEMMA
    ),
    "gemma3": _case("gemma3_text", "Gemma3ForCausalLM", **_GEMMA3),
    "gemma3-scaled-global-rope": _case(
        "gemma3_text", "Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_local_base_freq=5000.0, final_logit_softcapping=0.5, **_GEMMA3,
    ),
    "phi3": _phi3(sliding_window=8),
    "phi3-partial-rope": _phi3(partial_rotary_factor=0.5),
    "phi3-longrope-short": _longrope(4, 128),
    "phi3-longrope-past-length": _longrope(4, 16),
    "phi3-longrope-crossing": _longrope(4, 48),
    "smollm3": _case("smollm3", "SmolLM3ForCausalLM", num_hidden_layers=4, tie_word_embeddings=True),
    "smollm3-window": _case(
        "smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=8
    ),
    "gpt2": _gpt2(),
    "gpt2-odd-options": _gpt2(
        n_inner=72, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False, activation_function="gelu"
    ),
    "olmo2": _case("olmo2", "Olmo2ForCausalLM"),
    "olmo2-tied-wide-heads": _case("olmo2", "Olmo2ForCausalLM", head_dim=12, tie_word_embeddings=True),
}  # fmt: skip


def tensors(raw: Mapping[str, Any], seed: int = 0) -> Tensors:
    """A random state under Hugging Face's names: matrices [out, in] (GPT-2's transposed), float32."""
    config = config_from_hf(raw)
    graph, shapes = abstract_model(config)
    rng = np.random.default_rng(seed)
    state: Tensors = {}
    sources = manifest(config).sources
    for path, leaf in sorted(zip(graph.paths, shapes, strict=True)):
        source = sources[path]
        for part in source.parts(leaf.shape):
            values = rng.standard_normal(part.shape).astype(np.float32)
            if "norm" in path and path.endswith("weight"):
                values = 1.0 - source.add + 0.2 * values
            elif path.endswith("bias"):
                values *= 0.2
            else:  # wide enough that greedy decoding wanders, narrow enough that it does not repeat its input
                values *= 1.6 * config.hidden_size**-0.5 / (config.embed_scale if path == "embed.weight" else 1.0)
            state[part.name] = values.astype(np.float32)
    return state


def write(
    folder: Path,
    raw: Mapping[str, Any],
    state: Mapping[str, NDArray[Any]] | None = None,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """A checkpoint folder: config.json and one or several safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": dtype}))
    state = tensors(raw, seed) if state is None else state
    wanted = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    state = {name: np.ascontiguousarray(value.astype(wanted)) for name, value in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in sorted(state)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in state.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return folder


def model(raw: Mapping[str, Any], state: Mapping[str, NDArray[Any]]) -> LoadedModel:
    """The float32 model of a state in memory, without any file."""
    config = config_from_hf(raw)
    graph, shapes = abstract_model(config)
    sources = manifest(config).sources
    leaves = tuple(
        jnp.asarray(assemble(sources[path], leaf.shape, leaf.dtype, state.__getitem__))
        for path, leaf in zip(graph.paths, shapes, strict=True)
    )
    return LoadedModel(config, graph, leaves, fingerprint=f"test-{config.digest()}")


@functools.cache
def case(name: str) -> LoadedModel:
    """The model of one of the CASES."""
    return model(CASES[name], tensors(CASES[name]))
