"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, norm_sources, qk_norm_sources
from rekindle._src.models.families.mixtral import usual_expert_sources
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    spec = keys.experts(
        normalize=keys.get("norm_topk_prob", False),
    )
    return decoder(
        keys,
        window=keys.window(4096) if keys.get("use_sliding_window", False) else None,
        attention_bias=keys.get("attention_bias", False),
        moe=tuple(spec if sparse else None for sparse in sparse_layers(keys)),
    )


def sparse_layers(keys: Keys) -> list[bool]:
    """Return which layers have experts."""
    dense, step = keys.get("mlp_only_layers", []), keys.size("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(keys.size("num_hidden_layers"))]


module = decoder_of("QkNormSparseBlock")
manifest = manifest_of(attention_sources, qk_norm_sources, norm_sources, usual_expert_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    experts = {
        **model.experts(),
        "norm_topk_prob": True,  # known by the architecture
        "attention_bias": model.has("blk.0.attn_q.bias"),
    }
    return model.decoder() | experts | model.rope()


GGUF = GgufForm(architecture="qwen3moe", read=read_gguf)
ALIASES = {"num_experts": "num_local_experts"}
FAMILY = Family("Qwen3MoeForCausalLM", config, module, manifest, ALIASES, GGUF)
