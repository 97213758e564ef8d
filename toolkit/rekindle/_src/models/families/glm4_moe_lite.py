"""GLM-4.7-Flash: attention over latent pages, and experts chosen with a correction with an MLP beside them."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import deepseek_v2
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys


def config(keys: Keys) -> ModelConfig:
    inner, layers = keys.size("moe_intermediate_size"), keys.size("num_hidden_layers")
    spec = keys.experts(
        "n_routed_experts",
        normalize=keys.get("norm_topk_prob", True),
        scoring="sigmoid",
        correction=True,
        scale=float(keys.get("routed_scaling_factor", 1.8)),
        groups=keys.get("n_group", 1),
        top_groups=keys.get("topk_group", 1),
        shared_size=inner * keys.get("n_shared_experts", 1),
    )
    dense = keys.get("first_k_dense_replace", 1)
    kinds = keys.get("mlp_layer_types", ["dense" if layer < dense else "sparse" for layer in range(layers)])
    moe = tuple(spec if kind == "sparse" else None for kind in kinds)
    interleaved = keys.get("rope_interleave", True)
    return deepseek_v2.latent_decoder(keys, moe, query_rank=768, interleaved=interleaved, eps=1e-5)


ALIASES = {"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"}
FAMILY = Family("Glm4MoeLiteForCausalLM", config, deepseek_v2.module, deepseek_v2.manifest, ALIASES, deepseek_v2.GGUF)
