"""Granite 3 with experts: Granite whose MLPs are mixtures, with all experts of a layer in one tensor."""

from __future__ import annotations

from typing import Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.granite import granite_fields, module
from rekindle._src.models.families.llama import attention_sources, gate_up_role, manifest_of, norm_sources
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import experts as experts_role
from rekindle._src.models.roles import row


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, kv_heads_implied=True, **granite_moe_fields(keys))


def granite_moe_fields(keys: Keys, shared_size: int = 0) -> dict[str, Any]:
    spec = keys.experts(
        "num_local_experts",
        size="intermediate_size",
        normalize=True,  # it is the softmax over the chosen experts
        shared_size=shared_size,
    )
    return granite_fields(keys) | {"moe": (spec,) * keys.size("num_hidden_layers")}


def fused_expert_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    spec, prefix = config.moe[layer], f"model.layers.{layer}"
    assert spec is not None, "every layer has experts"
    count, inner = spec.num_experts, spec.intermediate_size
    sources = {
        "mlp.router.weight": one(f"{prefix}.block_sparse_moe.router.layer.weight", count),
        "mlp.gate_up.weight": one(
            f"{prefix}.block_sparse_moe.input_linear.weight", count, role=experts_role(count, gate_up_role(inner))
        ),
        "mlp.down.weight": one(
            f"{prefix}.block_sparse_moe.output_linear.weight", count, role=experts_role(count, row(inner))
        ),
    }
    if shared := spec.shared_size:
        name = f"{prefix}.shared_mlp"
        sources["mlp.shared.gate_up.weight"] = one(f"{name}.input_linear.weight", 2 * shared, role=gate_up_role(shared))
        sources["mlp.shared.down.weight"] = one(f"{name}.output_linear.weight", config.hidden_size, role=row(shared))
    return sources


manifest = manifest_of(attention_sources, norm_sources, fused_expert_sources)
FAMILY = Family("GraniteMoeForCausalLM", config, module, manifest)
