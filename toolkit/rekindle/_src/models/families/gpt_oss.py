"""gpt-oss: experts in every layer, biases everywhere, attention with sinks, and a window in every other layer."""

from __future__ import annotations

from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import attention_sources, expert_sources, manifest_of, norm_sources
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import FusedExperts, Source, one
from rekindle._src.models.roles import Span, column

THETA = 150_000.0
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("hidden_act", "silu")
    keys.only("swiglu_alpha", 1.702)
    keys.only("swiglu_limit", 7.0)
    if not keys.get("rope_parameters") and not keys.get("rope_scaling"):
        keys.raw["rope_scaling"] = YARN
    layers, head_dim = keys.size("num_hidden_layers"), keys.size("head_dim")
    everywhere, nearby = (
        AttentionSpec(scale=head_dim**-0.5, rope=keys.rope(head_dim, theta=THETA), sliding_window=window, sinks=True)
        for window in (None, keys.window(128))
    )
    experts = keys.experts(
        "num_local_experts",
        size="intermediate_size",
        normalize=True,  # it is the softmax over the chosen experts
        bias=True,
    )
    return decoder(
        keys,
        head_dim=head_dim,
        eps=1e-5,
        attention=tuple(
            nearby if slides else everywhere for slides in keys.layer_types([n % 2 == 0 for n in range(layers)])
        ),
        activation="clamped_silu",
        attention_bias=keys.get("attention_bias", True),
        moe=(experts,) * layers,
    )


module = decoder_of("SinkBlock")


def sink_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    heads = config.num_heads
    role = column(Span(heads, heads))
    return {"attention.sinks": one(f"model.layers.{layer}.self_attn.sinks", heads, role=role)}


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.mlp"
    names = ("gate_proj", "up_proj", "down_proj")
    return expert_sources(config, layer, f"{prefix}.router", f"{prefix}.experts", names)


manifest = manifest_of(
    attention_sources, sink_sources, norm_sources, mlp_sources, fused=FusedExperts(interleaved=True, transposed=True)
)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {
        **model.experts("num_local_experts", size="intermediate_size"),
        "sliding_window": model.integer("attention.sliding_window"),
        "attention_bias": model.has("blk.0.attn_q.bias"),
    }
    rope = model.rope(theta=THETA)
    if rope.get("rope_scaling", {}).get("rope_type") == "yarn":
        rope["rope_scaling"]["truncate"] = False  # known by the architecture
    else:
        rope["rope_parameters"] = {"rope_type": "default"}
    return model.decoder() | model.sliding_layers() | keys | rope


GGUF = GgufForm(
    architecture="gpt-oss",
    read=read_gguf,
    names={"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    reads_only="llama.cpp rounds the ramp of YaRN, and truncate is false",
)
ALIASES = {"num_experts": "num_local_experts"}
FAMILIES = {"gpt_oss": Family("GptOssForCausalLM", config, module, manifest, ALIASES, GGUF)}
