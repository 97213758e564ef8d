"""Llama 2, 3 and 3.x and SmolLM2, and the decoder that most other families are variants of."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.nn.layers import Attend, Attention, GatedMlp, RopeTables, soft_cap
from rekindle._src.models.nn.linear import Embedding, Linear, RMSNorm, head_logits
from rekindle._src.models.precision import Precision
from rekindle._src.models.roles import Role, Span, column, heads, row, vocab


def config(keys: Keys) -> ModelConfig:
    return decoder(
        keys,
        kv_heads_implied=True,
        qkv_bias=keys.get("attention_bias", False),
        o_bias=keys.get("attention_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


class Block(nnx.Module):
    """One layer: a norm and attention, a norm and the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.attention = self.make_attention(config, layer, precision)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.mlp = self.make_mlp(config, layer, precision)

    def make_attention(self, config: ModelConfig, layer: int, precision: Precision) -> Attention:
        return Attention(config, layer, precision)

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        return GatedMlp(config, precision)

    def __call__(self, x: jax.Array, tables: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("attention"):
            x = self.attention(x, tables, attend, x, self.attention_norm)
        with jax.named_scope("mlp"):
            return self.mlp(x, x, self.mlp_norm)


class Llama(nnx.Module):
    """The decoder: embedding, blocks, final norm, head. A family that differs within the block sets `block`."""

    block: Callable[[ModelConfig, int, Precision], nnx.Module] = Block

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        self.config, self.precision = config, precision
        self.embed = Embedding(config.vocab_size, config.hidden_size, precision)
        self.layers = nnx.List([self.block(config, layer, precision) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.vocab_size, config.hidden_size, precision, quantize=precision.quantize_embeddings)
        )

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, lengths: jax.Array | None = None
    ) -> jax.Array:
        """Compute tokens, positions [T] → hidden [T, E] after the final norm; `lengths` as in `rope.tables`."""
        x, tables = self.begin(tokens, positions, lengths)
        for layer in self.layers:
            x = layer(x, tables, attend)
        return self.end(x)

    def begin(
        self, tokens: jax.Array, positions: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, RopeTables]:
        """Compute the input of the first layer, and the rope tables."""
        with jax.named_scope("embed"):
            x = self.embed(tokens)
            if self.config.embed_scale != 1.0:
                # Rounded, by one bit more than the product would be: XLA:CPU would else join it to the first layer's
                # addition, where both are in one program, and other bits would come out than where they are in two.
                x = jax.lax.reduce_precision(x * self.config.embed_scale, 8, 22)
        return x, RopeTables(self.config, positions, lengths)

    def end(self, x: jax.Array) -> jax.Array:
        """Compute the hidden states from the last layer's output."""
        return self.norm(x)

    def logits(self, hidden: jax.Array, count: jax.Array | None = None) -> jax.Array:
        """Compute hidden [N, E] → float32 [N, V]; rows after the first `count` are undefined."""
        with jax.named_scope("logits"):
            head = self.embed if self.head is None else self.head
            return soft_cap(head_logits(hidden, head, self.precision, count=count), self.config.final_soft_cap)


def manifest(config: ModelConfig) -> Manifest:
    return Manifest(outer_sources(config) | blocks(config, attention_sources, norm_sources, mlp_sources))


def outer_sources(config: ModelConfig, *, add: float = 0.0) -> dict[str, Source]:
    """Return the sources of the embedding, the final norm and, unless it is tied, the head."""
    V, E = config.vocab_size, config.hidden_size
    sources = {
        "embed.weight": one("model.embed_tokens.weight", V, role=vocab(V)),
        "norm.weight": one("model.norm.weight", E, add=add),
    }
    if not config.tie_embeddings:
        sources["head.weight"] = one("lm_head.weight", V, role=vocab(V))
    return sources


Piece = Callable[[ModelConfig, int], dict[str, Source]]


def blocks(config: ModelConfig, *pieces: Piece) -> dict[str, Source]:
    """Return the sources of every layer. Each piece returns sources of one layer, with paths relative to it."""
    sources: dict[str, Source] = {}
    for layer in range(config.num_layers):
        for piece in pieces:
            sources |= {f"layers.{layer}.{path}": source for path, source in piece(config, layer).items()}
    return sources


def attention_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    module, prefix = "attention", f"model.layers.{layer}.self_attn"
    D = config.head_dim
    rows = (config.num_heads * D, config.num_kv_heads * D, config.num_kv_heads * D)
    role = column(*heads(config.num_heads, config.num_kv_heads, D))
    sources = {
        f"{module}.qkv.weight": Source(names=tuple(f"{prefix}.{x}_proj.weight" for x in "qkv"), rows=rows, role=role),
        f"{module}.out.weight": one(f"{prefix}.o_proj.weight", config.hidden_size, role=row(config.num_heads * D)),
    }
    if config.qkv_bias:
        names = tuple(f"{prefix}.{x}_proj.bias" for x in "qkv")
        sources[f"{module}.qkv.bias"] = Source(names=names, rows=rows, role=role)
    if config.o_bias:
        sources[f"{module}.out.bias"] = one(f"{prefix}.o_proj.bias", config.hidden_size)
    return sources


def qk_norm_sources(config: ModelConfig, layer: int, *, add: float = 0.0) -> dict[str, Source]:
    """Return the norms of q and k (Qwen3, Gemma 3): all heads of q share one [D] weight, those of k another."""
    prefix = f"model.layers.{layer}.self_attn"
    return {
        "attention.qk_norm.weight": Source(
            names=(f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"),
            rows=(config.num_heads, config.num_kv_heads),
            tiled=True,
            add=add,
            role=column(*heads(config.num_heads, config.num_kv_heads, 1)[:2]),
        )
    }


def norm_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, E = f"model.layers.{layer}", config.hidden_size
    return {
        "attention_norm.weight": one(f"{prefix}.input_layernorm.weight", E),
        "mlp_norm.weight": one(f"{prefix}.post_attention_layernorm.weight", E),
    }


def gate_up_role(inner: int) -> Role:
    """Return the role of gate and up in one matrix: every device has the same rows of both."""
    return column(Span(inner), Span(inner))


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, inner = f"model.layers.{layer}.mlp", config.intermediate_size
    role = gate_up_role(inner)
    sources = {
        "mlp.gate_up.weight": Source(
            names=(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), rows=(inner, inner), role=role
        ),
        "mlp.down.weight": one(f"{prefix}.down_proj.weight", config.hidden_size, role=row(inner)),
    }
    if config.mlp_bias:
        sources |= {
            "mlp.gate_up.bias": Source(
                names=(f"{prefix}.gate_proj.bias", f"{prefix}.up_proj.bias"), rows=(inner, inner), role=role
            ),
            "mlp.down.bias": one(f"{prefix}.down_proj.bias", config.hidden_size),
        }
    return sources


FAMILY = Family("LlamaForCausalLM", config, Llama, manifest)
