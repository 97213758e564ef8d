"""ModernBERT: an encoder with attention in both directions, and a window in two of three layers. It embeds only."""

from __future__ import annotations

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import blocks, fused_mlp
from rekindle._src.models.family import Family, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.roles import column, heads, row, vocab


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("norm_bias", False)
    keys.only("rope_scaling")
    layers, head_dim = keys.size("num_hidden_layers"), keys.size("hidden_size") // keys.size("num_attention_heads")
    # Older files have a key for each rope.
    old = {"rope_theta": keys.get("global_rope_theta"), "rope_local_base_freq": keys.get("local_rope_theta")}
    ropes = ConfigKeys(keys.raw | {name: theta for name, theta in old.items() if theta is not None})
    full, nearby = (
        AttentionSpec(
            scale=head_dim**-0.5,
            sliding_window=window,
            causal=False,
            rope=ropes.rope(head_dim, theta=theta, layer_type=kind),
        )
        for kind, theta, window in (
            ("full_attention", 160_000.0, None),
            ("sliding_attention", 10_000.0, keys.size("local_attention", 128) // 2 + 1),
        )
    )
    every = keys.size("global_attn_every_n_layers", 3)
    slides = keys.layer_types([layer % every != 0 for layer in range(layers)])
    return decoder(
        keys,
        kv_heads_implied=True,
        num_kv_heads=keys.size("num_attention_heads"),
        tie_embeddings=True,
        attention=tuple(nearby if slide else full for slide in slides),
        activation=keys.activation("hidden_activation", "gelu"),
        norm_eps=keys.get("norm_eps", 1e-5),
        attention_bias=keys.get("attention_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


module = decoder_of("EncoderBlock", "Encoder")


def manifest(config: ModelConfig) -> Manifest:
    V, E = config.vocab_size, config.hidden_size
    outer = {
        "embed.weight": one("model.embeddings.tok_embeddings.weight", V, role=vocab(V)),
        "embed_norm.weight": one("model.embeddings.norm.weight", E),
        "norm.weight": one("model.final_norm.weight", E),
    }
    # Those of other tasks than embedding.
    heads_of_tasks = (r"(model\.)?(head|decoder|classifier)\..*",)
    return Manifest(outer | blocks(config, attention_sources, mlp_sources), ignored=heads_of_tasks)


def attention_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, E = f"model.layers.{layer}", config.hidden_size
    role = column(*heads(config.num_heads, config.num_heads, config.head_dim))
    sources = {
        "attention.qkv.weight": one(f"{prefix}.attn.Wqkv.weight", 3 * E, role=role),
        "attention.out.weight": one(f"{prefix}.attn.Wo.weight", E, role=row(E)),
    }
    if layer:
        sources["attention_norm.weight"] = one(f"{prefix}.attn_norm.weight", E)
    if config.qkv_bias:
        sources["attention.qkv.bias"] = one(f"{prefix}.attn.Wqkv.bias", 3 * E, role=role)
        sources["attention.out.bias"] = one(f"{prefix}.attn.Wo.bias", E)
    return sources


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}"
    norm = {"mlp_norm.weight": one(f"{prefix}.mlp_norm.weight", config.hidden_size)}
    inner, bias = config.intermediate_size, config.mlp_bias
    return norm | fused_mlp(config, inner, f"{prefix}.mlp.Wi", f"{prefix}.mlp.Wo", bias=bias)


FAMILIES = {"modernbert": Family("ModernBertModel", config, module, manifest, layer_norms=True)}
