"""LFM2 with experts (8B-A1B): LFM2 with experts in all but the first layers, chosen with a correction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import lfm2
from rekindle._src.models.families.lfm2 import mixer_fields, mixer_sources, module, norm_sources
from rekindle._src.models.families.llama import manifest_of
from rekindle._src.models.families.mixtral import expert_sources
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    experts = keys.experts(
        normalize=keys.get("norm_topk_prob", True),
        epsilon=1e-6,
        scoring="sigmoid",
        correction=keys.get("use_expert_bias", True),
        scale=float(keys.get("routed_scaling_factor", 1.0)),
    )
    layers, dense = range(keys.size("num_hidden_layers")), keys.get("num_dense_layers", 2)
    return decoder(keys, moe=tuple(None if layer < dense else experts for layer in layers), **mixer_fields(keys))


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, spec = f"model.layers.{layer}.feed_forward", config.moe[layer]
    if spec is None:
        return lfm2.mlp_sources(config, layer)
    sources = expert_sources(config, layer, f"{prefix}.gate", f"{prefix}.experts", ("w1", "w3", "w2"))
    if spec.correction:
        sources["mlp.correction"] = one(f"{prefix}.expert_bias", spec.num_experts)
    return sources


manifest = manifest_of(mixer_sources, norm_sources, mlp_sources, norm=lfm2.OUTER_NORM)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    model.only("expert_gating_func", 2)  # sigmoid
    dense = model.integer("leading_dense_block_count", 0)
    return lfm2.mixer_keys(model) | {
        **model.experts(),
        "num_dense_layers": dense,
        "use_expert_bias": model.has(f"blk.{dense}.exp_probs_b.bias"),
        "norm_topk_prob": True,  # known by the architecture
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
    }


GGUF = GgufForm(
    architecture="lfm2moe",
    read=read_gguf,
    names={**lfm2.NAMES, "feed_forward.gate": "ffn_gate_inp"},
    tensors={"feed_forward.expert_bias": "exp_probs_b.bias"},
    rewritten=lfm2.rewritten,
    reads_only=lfm2.REASON,
)
FAMILY = Family("Lfm2MoeForCausalLM", config, module, manifest, gguf=GGUF)
