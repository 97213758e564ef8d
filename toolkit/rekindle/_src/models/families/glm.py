"""GLM-4 (9B): Llama with biases of q, k and v, a fused gate, and rotated pairs of neighbours in half of each head.

GLM-4-0414 (9B, 32B) has norms before and after each half of a block.
"""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, decoder_of, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source


def config(keys: ConfigKeys) -> ModelConfig:
    head_dim = keys.size("head_dim")
    rope = keys.rope(head_dim, partial=True, part=0.5, interleaved=True)
    bias = keys.get("attention_bias", True)
    return decoder(keys, head_dim=head_dim, eps=0.00000015625, rope=rope, qkv_bias=bias)


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.mlp"
    return llama.fused_mlp(config, config.intermediate_size, f"{prefix}.gate_up_proj", f"{prefix}.down_proj")


sandwich_norm_sources = llama.norms_of(
    attention_norm="input_layernorm",
    attention_out_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_out_norm="post_mlp_layernorm",
)
manifest = llama.manifest_of(llama.attention_sources, llama.norm_sources, mlp_sources)
manifest_0414 = llama.manifest_of(llama.attention_sources, sandwich_norm_sources, mlp_sources)
NAMES = {
    "post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip
GGUF = GgufForm(architecture="glm4", read=with_biases(attention_bias="attn_q"), names=NAMES)
FAMILIES = {
    "glm": Family("GlmForCausalLM", config, llama.module, manifest),
    "glm4": Family("Glm4ForCausalLM", config, decoder_of("SandwichBlock"), manifest_0414, gguf=GGUF),
}
