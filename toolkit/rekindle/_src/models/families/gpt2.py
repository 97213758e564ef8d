"""GPT-2: learned positions, layer norms, biases everywhere, a plain MLP."""

from __future__ import annotations

from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ACTIVATIONS, ConfigKeys, token_ids
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.roles import REPLICATED, Span, column, heads, row, vocab
from rekindle.errors import UnsupportedModel


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("add_cross_attention", False)
    keys.only("activation_function", *ACTIVATIONS)
    hidden, layers, heads = keys.size("n_embd"), keys.size("n_layer"), keys.size("n_head")
    if hidden % heads:
        raise UnsupportedModel(f"n_embd={hidden} is not a multiple of n_head={heads}. Check config.json.")
    scale = (hidden // heads) ** -0.5 if keys.get("scale_attn_weights", True) else 1.0
    shrink = keys.get("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        model_type="gpt2",
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=keys.size("n_inner", 4 * hidden),
        max_position_embeddings=keys.size("n_positions"),
        tie_embeddings=keys.get("tie_word_embeddings", True),
        attention=tuple(AttentionSpec(scale=scale / (layer + 1 if shrink else 1)) for layer in range(layers)),
        activation=ACTIVATIONS[keys.get("activation_function", "gelu_new")],
        norm_eps=keys.get("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        eos_token_ids=token_ids(keys.get("eos_token_id", 50256)),
        bos_token_id=keys.get("bos_token_id", 50256),
        dtype=keys.get("dtype", keys.get("torch_dtype")),
    )


module = decoder_of("LayerNormBlock", "Gpt2")


def manifest(config: ModelConfig) -> Manifest:
    V, E, inner = config.vocab_size, config.hidden_size, config.intermediate_size
    sources: dict[str, Source] = {
        "embed.weight": one("transformer.wte.weight", V, role=vocab(V)),
        "position_embed.weight": one("transformer.wpe.weight", config.max_position_embeddings),
        "norm.weight": one("transformer.ln_f.weight", E),
        "norm.bias": one("transformer.ln_f.bias", E),
    }
    if not config.tie_embeddings:
        sources["head.weight"] = one("lm_head.weight", V, role=vocab(V))
    for layer in range(config.num_layers):
        module, prefix = f"layers.{layer}", f"transformer.h.{layer}"
        for path, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            sources[f"{module}.{path}.weight"] = one(f"{prefix}.{name}.weight", E)
            sources[f"{module}.{path}.bias"] = one(f"{prefix}.{name}.bias", E)
        fused = column(*heads(config.num_heads, config.num_heads, config.head_dim))
        for path, name, rows, weight, bias in (
            ("attention.qkv", "attn.c_attn", 3 * E, fused, fused),
            ("attention.out", "attn.c_proj", E, row(E), REPLICATED),
            ("up", "mlp.c_fc", inner, column(Span(inner)), column(Span(inner))),
            ("down", "mlp.c_proj", E, row(inner), REPLICATED),
        ):
            sources[f"{module}.{path}.weight"] = one(f"{prefix}.{name}.weight", rows, transpose=True, role=weight)
            sources[f"{module}.{path}.bias"] = one(f"{prefix}.{name}.bias", rows, role=bias)
    # Old checkpoints contain the causal mask of every layer.
    return Manifest(sources, prefix="transformer.", ignored=(r"h\.\d+\.attn\.(masked_)?bias",))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return {
        "n_embd": model.integer("embedding_length"),
        "n_layer": model.layers,
        "n_head": model.integer("attention.head_count"),
        "n_inner": model.integer("feed_forward_length"),
        "n_positions": model.integer("context_length"),
        "layer_norm_epsilon": model.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": not model.has("output.weight"),
    }


GGUF = GgufForm(
    architecture="gpt2", read=read_gguf, norm="layer_norm_epsilon", activation="gelu_tanh", rotates=lambda layer: False
)
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
FAMILIES = {"gpt2": Family("GPT2LMHeadModel", config, module, manifest, ALIASES, GGUF, layer_norms=True)}
