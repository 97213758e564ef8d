"""GPT-2: learned positions, layer norms, biases everywhere, a plain MLP."""

from __future__ import annotations

import jax
from flax import nnx

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import ACTIVATIONS, Keys, token_ids
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.nn.layers import Attend, Attention, LayerNorm, RopeTables
from rekindle._src.models.nn.linear import Embedding, Linear, head_logits
from rekindle._src.models.precision import Precision
from rekindle._src.models.roles import REPLICATED, Span, column, heads, row, vocab
from rekindle_kernels import activate


def config(keys: Keys) -> ModelConfig:
    keys.only("add_cross_attention", False)
    keys.only("activation_function", *ACTIVATIONS)
    hidden, layers, heads = keys.size("n_embd"), keys.size("n_layer"), keys.size("n_head")
    scale = (hidden // heads) ** -0.5 if keys.raw.get("scale_attn_weights", True) else 1.0
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


class Gpt2Block(nnx.Module):
    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        E, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = LayerNorm(E, config.norm_eps)
        self.attention = Attention(config, layer, precision)
        self.mlp_norm = LayerNorm(E, config.norm_eps)
        self.up = Linear(inner, E, precision, bias=True)
        self.down = Linear(E, inner, precision, bias=True, partial=True)
        self.activation = config.activation

    def __call__(self, x: jax.Array, tables: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("attention"):
            x = self.attention(self.attention_norm(x), tables, attend, x)
        with jax.named_scope("mlp"):
            return self.down(activate(self.up(self.mlp_norm(x)), self.activation), residual=x)


class Gpt2(nnx.Module):
    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        self.config, self.precision = config, precision
        self.embed = Embedding(config.vocab_size, config.hidden_size, precision)
        # Rows are only looked up, so quantising them would save little.
        plain = Precision(weights=precision.weights, stream=precision.stream)
        self.position_embed = Embedding(config.max_position_embeddings, config.hidden_size, plain)
        self.layers = nnx.List([Gpt2Block(config, layer, precision) for layer in range(config.num_layers)])
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.vocab_size, config.hidden_size, precision, quantize=precision.quantize_embeddings)
        )

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, lengths: jax.Array | None = None
    ) -> jax.Array:
        x, tables = self.begin(tokens, positions)
        for layer in self.layers:
            x = layer(x, tables, attend)
        return self.end(x)

    def begin(
        self, tokens: jax.Array, positions: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, RopeTables]:
        with jax.named_scope("embed"):
            x = self.embed(tokens) + self.position_embed(positions)
        return x, RopeTables(self.config, positions)

    def end(self, x: jax.Array) -> jax.Array:
        return self.norm(x)

    def logits(self, hidden: jax.Array, count: jax.Array | None = None) -> jax.Array:
        with jax.named_scope("logits"):
            return head_logits(hidden, self.embed if self.head is None else self.head, self.precision, count=count)


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


FAMILY = Family(
    "GPT2LMHeadModel",
    config,
    Gpt2,
    manifest,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
