"""OLMoE: Llama with experts in every layer, and norms over all heads of q and of k together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, norm_sources
from rekindle._src.models.families.mixtral import usual_expert_sources
from rekindle._src.models.families.olmo2 import wide_norm_sources
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    keys.only("clip_qkv")
    spec = keys.experts(
        size="intermediate_size",
        normalize=keys.get("norm_topk_prob", False),
    )
    bias, layers = keys.get("attention_bias", False), keys.size("num_hidden_layers")
    return decoder(keys, kv_heads_implied=True, eps=1e-5, attention_bias=bias, moe=(spec,) * layers)


module = decoder_of("WideNormSparseBlock")
manifest = manifest_of(attention_sources, wide_norm_sources, norm_sources, usual_expert_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {
        **model.experts(size=None),
        "norm_topk_prob": False,  # known by the architecture
    }
    return model.decoder() | keys | model.rope()


GGUF = GgufForm(
    architecture="olmoe", read=read_gguf, reads_only="rekindle does not write weights of experts that have another sum"
)
ALIASES = {"num_experts": "num_local_experts"}
FAMILY = Family("OlmoeForCausalLM", config, module, manifest, ALIASES, gguf=GGUF)
