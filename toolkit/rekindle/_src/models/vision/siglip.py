"""SigLIP, the transformer that several families' encoders are, and the origin of its weights."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax import Array

from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.nn.layers import LayerNorm
from rekindle._src.models.nn.linear import Linear
from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.config import MAX_SIDE, VisionConfig, VisionKeys, encoder
from rekindle._src.models.vision.family import GgufModel, fused, rows_of, vision_keys, with_bias
from rekindle._src.models.vision.inputs import PatchBatch
from rekindle._src.models.vision.layers import PatchBlock, PatchPass, PositionTable, VisionTower, grouped

DEFAULTS = {
    "num_channels": 3, "image_size": 224, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    "num_hidden_layers": 12, "intermediate_size": 3072,
}  # fmt: skip


def siglip(keys: VisionKeys, merge: int, **fields: Any) -> VisionConfig:
    """Return the config of an encoder with positions for a square picture of `image_size`."""
    if "positions" not in fields:
        side = keys.number("image_size", 1 << 14) // keys.number("patch_size", MAX_SIDE)
        if not side:
            raise keys.wrong("image_size", "at least the side of a patch")
        fields["positions"] = side * side
    return encoder(
        keys,
        channels=keys.number("num_channels", 16),
        merge=merge,
        out_size=keys.text.size("hidden_size"),
        norm_eps=keys.epsilon("layer_norm_eps"),
        activation=keys.activation("hidden_act"),
        **fields,
    )


class SiglipTower(VisionTower):
    """SigLIP up to its last norm. What follows, a family adds in `project`."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        self.patch = Linear(config.hidden_size, config.patch_length, precision, bias=True)
        self.positions = PositionTable(config, precision)
        self.layers = nnx.List([PatchBlock(config, precision) for _ in range(config.num_layers)])
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)

    def begin(self, batch: PatchBatch) -> tuple[Array, PatchPass]:
        x = self.patch(batch.patches) + self.positions(batch)
        return x.astype(self.stream), PatchPass(batch.starts, batch.stops, None)

    def end(self, x: Array) -> Array:
        return self.project(self.norm(grouped(x, self.config)))

    def project(self, patches: Array) -> Array:
        """Compute the normed patches of each token [T, M, E] → tokens [T, X]."""
        raise NotImplementedError


def siglip_sources(config: VisionConfig, prefix: str) -> dict[str, Source]:
    """Return the sources of a `SiglipTower`."""
    E, heads = config.hidden_size, config.num_heads * config.head_dim
    sources = {
        **with_bias("patch", f"{prefix}.embeddings.patch_embedding", E),
        "positions.weight": one(f"{prefix}.embeddings.position_embedding.weight", config.positions),
        **with_bias("norm", f"{prefix}.post_layernorm", E),
    }
    for layer in range(config.num_layers):
        path, name = f"layers.{layer}", f"{prefix}.encoder.layers.{layer}"
        qkv = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
        sources |= with_bias(f"{path}.attention_norm", f"{name}.layer_norm1", E)
        sources |= fused(f"{path}.attention.qkv", qkv, heads)
        sources |= with_bias(f"{path}.attention.out", f"{name}.self_attn.out_proj", E)
        sources |= with_bias(f"{path}.mlp_norm", f"{name}.layer_norm2", E)
        sources |= with_bias(f"{path}.mlp.up", f"{name}.mlp.fc1", config.intermediate_size)
        sources |= with_bias(f"{path}.mlp.down", f"{name}.mlp.fc2", E)
    return sources


def unused(prefix: str) -> tuple[str, ...]:
    """Return patterns of tensors that a checkpoint may have: the head for other tasks, and numbers in a row."""
    escaped = prefix.replace(".", r"\.")
    return (rf"{escaped}\.head\..*", rf"{escaped}\.embeddings\.position_ids")


def siglip_keys(model: GgufModel) -> dict[str, Any]:
    """Return the keys of a vision_config that an mmproj file has of this encoder."""
    return {
        **vision_keys(model),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.integer("attention.head_count"),
        "image_size": model.integer("image_size"),
        "layer_norm_eps": model.number("attention.layer_norm_epsilon"),
        "num_patches": rows_of(model, "v.position_embd.weight"),
    }


def siglip_names(prefix: str) -> dict[str, str]:
    """Return llama.cpp's names of modules."""
    layer, own = f"{prefix}.encoder.layers.{{n}}", "v.blk.{n}"
    return {
        f"{prefix}.embeddings.patch_embedding": "v.patch_embd",
        f"{prefix}.embeddings.position_embedding": "v.position_embd",
        f"{prefix}.post_layernorm": "v.post_ln",
        f"{layer}.layer_norm1": f"{own}.ln1",
        f"{layer}.layer_norm2": f"{own}.ln2",
        **{f"{layer}.self_attn.{part}_proj": f"{own}.attn_{part}" for part in ("q", "k", "v", "out")},
        f"{layer}.mlp.fc1": f"{own}.ffn_up",
        f"{layer}.mlp.fc2": f"{own}.ffn_down",
    }
