"""Llama 2, 3 and 3.x and SmolLM2, and the sources of weights that most other families share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rekindle._src.models import roles
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import FusedExperts, Manifest, Source, one
from rekindle._src.models.roles import Role, Span, column, heads, row, vocab

Piece = Callable[[ModelConfig, int], dict[str, Source]]  # the sources of a part of one layer


def config(keys: ConfigKeys) -> ModelConfig:
    return decoder(
        keys,
        kv_heads_implied=True,
        attention_bias=keys.get("attention_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


def manifest_of(
    *pieces: Piece, add: float = 0.0, norm: str = "model.norm", fused: FusedExperts | None = None
) -> Callable[[ModelConfig], Manifest]:
    """Return the manifest of a family with layers made of these pieces; other options as in `outer_sources`."""
    return lambda config: Manifest(outer_sources(config, add=add, norm=norm) | blocks(config, *pieces), fused=fused)


def outer_sources(config: ModelConfig, *, add: float = 0.0, norm: str = "model.norm") -> dict[str, Source]:
    """Return the sources of the embedding, the final norm and, unless it is tied, the head."""
    V, E = config.vocab_size, config.hidden_size
    sources = {
        "embed.weight": one("model.embed_tokens.weight", V, role=vocab(V)),
        "norm.weight": one(f"{norm}.weight", E, add=add),
    }
    if not config.tie_embeddings:
        sources["head.weight"] = one("lm_head.weight", V, role=vocab(V))
    return sources


def blocks(config: ModelConfig, *pieces: Piece) -> dict[str, Source]:
    """Return the sources of every layer. Each piece returns sources of one layer, with paths relative to it."""
    sources: dict[str, Source] = {}
    for layer in range(config.num_layers):
        for piece in pieces:
            sources |= {f"layers.{layer}.{path}": source for path, source in piece(config, layer).items()}
    return sources


def attention_sources(config: ModelConfig, layer: int, prefix: str | None = None) -> dict[str, Source]:
    """Return the sources of a layer's attention; `prefix` is the checkpoint's."""
    prefix = prefix or f"model.layers.{layer}.self_attn"
    pages = config.pages_of(layer)
    K, D = pages.heads, pages.key_size
    rows = (config.num_heads * D, K * D, K * D)
    role = column(*heads(config.num_heads, K, D))
    sources = {
        "attention.qkv.weight": Source(names=tuple(f"{prefix}.{x}_proj.weight" for x in "qkv"), rows=rows, role=role),
        "attention.out.weight": one(f"{prefix}.o_proj.weight", config.hidden_size, role=row(config.num_heads * D)),
    }
    if config.qkv_bias:
        names = tuple(f"{prefix}.{x}_proj.bias" for x in "qkv")
        sources["attention.qkv.bias"] = Source(names=names, rows=rows, role=role)
    if config.o_bias:
        sources["attention.out.bias"] = one(f"{prefix}.o_proj.bias", config.hidden_size)
    return sources


def qk_norm_sources(config: ModelConfig, layer: int, *, add: float = 0.0) -> dict[str, Source]:
    """Return the norms of q and k (Qwen3, Gemma 3): all heads of q share one [D] weight, all heads of k another."""
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


def norms_of(add: float = 0.0, **names: str) -> Piece:
    """Return the sources of a layer's norms, by these names of tensors."""

    def sources(config: ModelConfig, layer: int) -> dict[str, Source]:
        return {
            f"{module}.weight": one(f"model.layers.{layer}.{name}.weight", config.hidden_size, add=add)
            for module, name in names.items()
        }

    return sources


norm_sources = norms_of(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")


def gate_up_role(inner: int) -> Role:
    """Return the role of gate and up in one matrix: every device has the same rows of both."""
    return column(Span(inner), Span(inner))


def mlp_of(name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Piece:
    """Return the sources of a layer's gated MLP, by these names of modules."""

    def sources(config: ModelConfig, layer: int) -> dict[str, Source]:
        prefix, inner = f"model.layers.{layer}.{name}", config.mlp_size(layer)

        def tensors(end: str) -> dict[str, Source]:
            names, role = (f"{prefix}.{gate}.{end}", f"{prefix}.{up}.{end}"), gate_up_role(inner)
            of_rows = {"role": row(inner)} if end == "weight" else {}
            return {
                f"mlp.gate_up.{end}": Source(names=names, rows=(inner, inner), role=role),
                f"mlp.down.{end}": one(f"{prefix}.{down}.{end}", config.hidden_size, **of_rows),
            }

        return tensors("weight") | (tensors("bias") if config.mlp_bias else {})

    return sources


mlp_sources = mlp_of("mlp")


def plain_mlp(
    config: ModelConfig, inner: int, prefix: str, *, up: str = "up_proj", down: str = "down_proj", module: str = "mlp."
) -> dict[str, Source]:
    """Return the sources of an MLP without a gate, by these names of modules."""
    E, role = config.hidden_size, column(Span(inner))
    sources = {
        f"{module}up.weight": one(f"{prefix}.{up}.weight", inner, role=role),
        f"{module}down.weight": one(f"{prefix}.{down}.weight", E, role=row(inner)),
    }
    if config.mlp_bias:
        sources[f"{module}up.bias"] = one(f"{prefix}.{up}.bias", inner, role=role)
        sources[f"{module}down.bias"] = one(f"{prefix}.{down}.bias", E)
    return sources


def fused_mlp(
    config: ModelConfig, inner: int, gate_up: str, down: str, *, module: str = "mlp", bias: bool = False
) -> dict[str, Source]:
    """Return the sources of a gated MLP with `gate_up` in one tensor."""
    role = gate_up_role(inner)
    sources = {
        f"{module}.gate_up.weight": one(f"{gate_up}.weight", 2 * inner, role=role),
        f"{module}.down.weight": one(f"{down}.weight", config.hidden_size, role=row(inner)),
    }
    if bias:
        sources[f"{module}.gate_up.bias"] = one(f"{gate_up}.bias", 2 * inner, role=role)
        sources[f"{module}.down.bias"] = one(f"{down}.bias", config.hidden_size)
    return sources


def expert_sources(
    config: ModelConfig, layer: int, router: str, experts: str, names: tuple[str, str, str]
) -> dict[str, Source]:
    """Return the sources of a layer's router and experts, or of its MLP; `names` are gate, up and down's."""
    spec = config.moe[layer]
    if spec is None:
        return mlp_sources(config, layer)
    gate, up, down = names
    size, numbers = spec.intermediate_size, range(spec.num_experts)
    experts_of = functools.partial(roles.experts, spec.num_experts)

    def stack(kind: str, of: tuple[str, ...], rows: tuple[int, ...], **role: Any) -> Source:
        names = tuple(f"{experts}.{number}.{name}.{kind}" for number in numbers for name in of)
        return Source(names=names, rows=rows, stack=True, **role)

    gate_up = functools.partial(stack, of=(gate, up), rows=(size, size), role=experts_of(gate_up_role(size)))
    downs = functools.partial(stack, of=(down,), rows=(config.hidden_size,))
    sources = {
        "mlp.router.weight": one(f"{router}.weight", spec.num_experts),
        "mlp.gate_up.weight": gate_up("weight"),
        "mlp.down.weight": downs("weight", role=experts_of(row(size))),
    }
    if spec.bias:
        sources |= {
            "mlp.router.bias": one(f"{router}.bias", spec.num_experts),
            "mlp.gate_up.bias": gate_up("bias"),
            "mlp.down_bias": downs("bias"),
        }
    return sources


def usual_expert_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    """Return the same by the names that most families have."""
    prefix = f"model.layers.{layer}.mlp"
    return expert_sources(config, layer, f"{prefix}.gate", f"{prefix}.experts", ("gate_proj", "up_proj", "down_proj"))


def shared_sources(config: ModelConfig, layer: int, shared: str, gate: str | None = None) -> dict[str, Source]:
    """Return the sources of the shared MLP alongside a layer's experts, and of its `gate`."""
    spec = config.moe[layer]
    if spec is None or not spec.shared_size:
        return {}
    names = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
    size = spec.shared_size
    sources = {
        "mlp.shared.gate_up.weight": Source(names=names, rows=(size, size), role=gate_up_role(size)),
        "mlp.shared.down.weight": one(f"{shared}.down_proj.weight", config.hidden_size, role=row(size)),
    }
    return sources if gate is None else sources | {"mlp.shared_gate.weight": one(f"{gate}.weight", 1)}


def gguf_variant(model: GgufModel) -> str | None:
    """Return the family of a file of llama.cpp's "llama", which has experts or a window for other families."""
    model.only("attention.scale", model.head_dim**-0.5)
    model.only("logit_scale", 1.0)
    model.only("embedding_scale", 1.0)
    if model.integer("expert_count", 0):
        return "mixtral"
    return "mistral" if model.integer("attention.sliding_window", 0) else None


module = decoder_of("Block")
manifest = manifest_of(attention_sources, norm_sources, mlp_sources)
read_gguf = with_biases(attention_bias="attn_q", mlp_bias="ffn_gate")
GGUF = GgufForm(architecture="llama", read=read_gguf, variant=gguf_variant, paired=True)
FAMILIES = {"llama": Family("LlamaForCausalLM", config, module, manifest, gguf=GGUF)}
