"""OLMoE: Llama with experts in every layer, and norms over all heads of q and of k together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig, MoeSpec
from rekindle._src.models.families.llama import attention_sources, blocks, norm_sources, outer_sources
from rekindle._src.models.families.mixtral import usual_expert_sources
from rekindle._src.models.families.olmo2 import wide_norm_sources
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    keys.only("clip_qkv")
    spec = MoeSpec(
        num_experts=keys.size("num_experts"),
        top_k=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("intermediate_size"),
        normalize=keys.get("norm_topk_prob", False),
    )
    bias, layers = keys.get("attention_bias", False), keys.size("num_hidden_layers")
    return decoder(keys, kv_heads_implied=True, eps=1e-5, qkv_bias=bias, o_bias=bias, moe=(spec,) * layers)


def module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn.decoders import Decoder, WideNormSparseBlock

    return Decoder(config, precision, WideNormSparseBlock)


def manifest(config: ModelConfig) -> Manifest:
    pieces = (attention_sources, wide_norm_sources, norm_sources, usual_expert_sources)
    return Manifest(outer_sources(config) | blocks(config, *pieces))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "norm_topk_prob": False,  # known by the architecture
    }
    return model.decoder() | keys | model.rope()


GGUF = GgufForm(
    architecture="olmoe", read=read_gguf, reads_only="rekindle does not write weights of experts that have another sum"
)
ALIASES = {"num_experts": "num_local_experts"}
FAMILY = Family("OlmoeForCausalLM", config, module, manifest, ALIASES, gguf=GGUF)
