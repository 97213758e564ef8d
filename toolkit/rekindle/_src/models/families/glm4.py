"""GLM-4-0414 (9B, 32B): GLM-4 with norms before and after each half of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.glm import fused_mlp_sources, glm_fields
from rekindle._src.models.families.llama import attention_sources, manifest_of, norms_of
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, **glm_fields(keys))


norm_sources = norms_of(
    attention_norm="input_layernorm",
    attention_out_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_out_norm="post_mlp_layernorm",
)
module = decoder_of("SandwichBlock")
manifest = manifest_of(attention_sources, norm_sources, fused_mlp_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"attention_bias": model.has("blk.0.attn_q.bias")} | model.rope()


NAMES = {
    "post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip
GGUF = GgufForm(architecture="glm4", read=read_gguf, names=NAMES)
FAMILY = Family("Glm4ForCausalLM", config, module, manifest, gguf=GGUF)
