"""Phi-3: Llama with projections that are fused in the checkpoint, and longrope for long contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import gate_up_role, manifest_of, module, norm_sources
from rekindle._src.models.family import Family, GgufForm, windows_in_all_layers
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import column, heads, row

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    raw = dict(keys.raw)
    raw["original_max_position_embeddings"] = keys.get("original_max_position_embeddings", 4096)
    for name in ("rope_scaling", "rope_parameters"):
        options = raw.get(name) or {}
        kind = options.get("rope_type", options.get("type"))
        if kind in ("su", "yarn"):  # earlier names of longrope
            raw[name] = {**options, "rope_type": "longrope"}
    keys = Keys(raw)
    return decoder(keys, kv_heads_implied=True, eps=1e-5, window=keys.window(), partial_rope=True)


def fused(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, inner = f"model.layers.{layer}", config.intermediate_size
    return {
        "attention.qkv.weight": one(
            f"{prefix}.self_attn.qkv_proj.weight",
            (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            role=column(*heads(config.num_heads, config.num_kv_heads, config.head_dim)),
        ),
        "attention.out.weight": one(
            f"{prefix}.self_attn.o_proj.weight", config.hidden_size, role=row(config.num_heads * config.head_dim)
        ),
        "mlp.gate_up.weight": one(f"{prefix}.mlp.gate_up_proj.weight", 2 * inner, role=gate_up_role(inner)),
        "mlp.down.weight": one(f"{prefix}.mlp.down_proj.weight", config.hidden_size, role=row(inner)),
    }


manifest = manifest_of(fused, norm_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"sliding_window": model.window, "attention_bias": False} | model.rope()


GGUF = GgufForm(architecture="phi3", read=read_gguf, windows=windows_in_all_layers)
FAMILIES = {"phi3": Family("Phi3ForCausalLM", config, module, manifest, gguf=GGUF)}
