"""Phi-3: Llama with projections that are fused in the checkpoint, and longrope for long contexts."""

from __future__ import annotations

from typing import Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import fused_mlp, manifest_of, module, norm_sources
from rekindle._src.models.family import Family, GgufForm, GgufModel, windows_in_all_layers
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import column, heads, row


def config(keys: ConfigKeys) -> ModelConfig:
    raw = dict(keys.raw)
    raw["original_max_position_embeddings"] = keys.get("original_max_position_embeddings", 4096)
    for name in ("rope_scaling", "rope_parameters"):
        options = raw.get(name) or {}
        kind = options.get("rope_type", options.get("type"))
        if kind in ("su", "yarn"):  # earlier names of longrope
            raw[name] = {**options, "rope_type": "longrope"}
    keys = ConfigKeys(raw)
    return decoder(keys, kv_heads_implied=True, eps=1e-5, window=keys.window(), partial_rope=True)


def fused(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, (H, K, D) = f"model.layers.{layer}", (config.num_heads, config.num_kv_heads, config.head_dim)
    qkv, out = f"{prefix}.self_attn.qkv_proj.weight", f"{prefix}.self_attn.o_proj.weight"
    return {
        "attention.qkv.weight": one(qkv, (H + 2 * K) * D, role=column(*heads(H, K, D))),
        "attention.out.weight": one(out, config.hidden_size, role=row(H * D)),
        **fused_mlp(config, config.intermediate_size, f"{prefix}.mlp.gate_up_proj", f"{prefix}.mlp.down_proj"),
    }


manifest = manifest_of(fused, norm_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"sliding_window": model.window, "attention_bias": False} | model.rope()


GGUF = GgufForm(architecture="phi3", read=read_gguf, windows=windows_in_all_layers)
FAMILIES = {"phi3": Family("Phi3ForCausalLM", config, module, manifest, gguf=GGUF)}
