"""Gemma 4 without an encoder (12B): norms and one matrix lead from large patches to tokens."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Manifest, one
from rekindle._src.models.nn.layers import LayerNorm
from rekindle._src.models.nn.linear import Linear, norm_rows, parameter
from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.config import (
    MAX_PATCH,
    MAX_POSITIONS,
    MAX_SIDE,
    MAX_SIZE,
    VisionConfig,
    VisionKeys,
)
from rekindle._src.models.vision.family import GgufModel, MmprojForm, TowerFamily, pixel_order, rows_of, with_bias
from rekindle._src.models.vision.inputs import PatchBatch, no_rows
from rekindle._src.models.vision.layers import PatchPass, VisionTower

DEFAULTS = {
    "patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120, "rms_norm_eps": 1e-6,
    "output_proj_dims": 3840,
}  # fmt: skip
LAYER_NORM_EPSILON = 1e-5  # PyTorch's own


def config(keys: VisionKeys) -> VisionConfig:
    """Return a config with patches as large as a token: a picture's grid is counted in those."""
    size = keys.number("mm_embed_dim", MAX_SIZE)
    keys.only("output_proj_dims", size)  # a norm and a matrix follow, of the same size
    side = keys.number("patch_size", MAX_SIDE) * keys.number("pooling_kernel_size", 64)
    keys.only("model_patch_size", side)
    if 3 * side**2 > MAX_PATCH:
        raise keys.wrong("patch_size", f"the side of patches of at most {MAX_PATCH:,} numbers")
    return VisionConfig(
        model_type=keys.model_type,
        hidden_size=size,
        intermediate_size=0,
        num_layers=0,
        num_heads=0,
        head_dim=0,
        out_size=keys.text.size("hidden_size"),
        patch_size=side,
        merge=1,
        positions=keys.number("mm_posemb_size", MAX_POSITIONS),
        norm_eps=keys.epsilon("rms_norm_eps"),
    )


class UnifiedTower(VisionTower):
    """The embedder of Gemma 4 12B. It has no layers."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        E, P = config.hidden_size, config.patch_length
        self.pixel_norm = LayerNorm(P, LAYER_NORM_EPSILON)
        self.patch = Linear(E, P, precision, bias=True)
        self.patch_norm = LayerNorm(E, LAYER_NORM_EPSILON)
        self.positions = parameter((config.positions, 2, E), precision.weights)  # of columns, and of rows
        self.position_norm = LayerNorm(E, LAYER_NORM_EPSILON)
        self.projection = Linear(config.out_size, E, precision)
        self.layers = nnx.List([])
        self.implementation = precision.implementation

    def begin(self, batch: PatchBatch) -> tuple[Array, PatchPass]:
        table = self.positions[...]
        x = self.patch_norm(self.patch(self.pixel_norm(jnp.asarray(batch.patches))))
        x = x + table[batch.columns, 0] + table[batch.rows, 1]
        return self.position_norm(x).astype(self.stream), PatchPass(batch.starts, batch.stops, None)

    def end(self, x: Array) -> Array:
        return self.projection(norm_rows(x, None, self.config.norm_eps, self.implementation))


def manifest(config: VisionConfig) -> Manifest:
    E = config.hidden_size
    sources = {
        **with_bias("pixel_norm", "vision_embedder.patch_ln1", config.patch_length),
        **with_bias("patch", "vision_embedder.patch_dense", E),
        **with_bias("patch_norm", "vision_embedder.patch_ln2", E),
        "positions": one("vision_embedder.pos_embedding", config.positions),
        **with_bias("position_norm", "vision_embedder.pos_norm", E),
        "projection.weight": one("embed_vision.embedding_projection.weight", config.out_size),
    }
    return Manifest(sources, prefix="", ignored=())


def read_mmproj(model: GgufModel) -> VisionConfig:
    merge = model.integer("projector.scale_factor", DEFAULTS["pooling_kernel_size"])
    keys = {
        "patch_size": model.integer("patch_size"),
        "pooling_kernel_size": merge,
        "mm_embed_dim": rows_of(model, "v.patch_embd.weight"),
        "output_proj_dims": rows_of(model, "v.patch_embd.weight"),
        "mm_posemb_size": rows_of(model, "v.position_embd.weight", 1),
        "rms_norm_eps": model.number("attention.layer_norm_epsilon"),
    }
    text = {"hidden_size": rows_of(model, "mm.input_projection.weight")}
    return config(VisionKeys({"model_type": "gemma4_unified", "vision_config": keys, "text_config": text}, DEFAULTS))


def channels_last(config: VisionConfig, name: str) -> TensorRewrite | None:
    """Return how the file has a patch: its channels one after the other, where a checkpoint has them by pixel."""
    order = pixel_order(config)
    if name == "vision_embedder.patch_dense.weight":
        return TensorRewrite(columns=order)
    return TensorRewrite(rows=order) if name.startswith("vision_embedder.patch_ln1.") else None


NAMES = {
    "vision_embedder.patch_ln1": "v.patch_norm.1", "vision_embedder.patch_dense": "v.patch_embd",
    "vision_embedder.patch_ln2": "v.patch_norm.2", "vision_embedder.pos_embedding": "v.position_embd.weight",
    "vision_embedder.pos_norm": "v.patch_norm.3", "embed_vision.embedding_projection": "mm.input_projection",
}  # fmt: skip
MMPROJ = MmprojForm(
    projector="gemma4uv",
    read=read_mmproj,
    names=lambda config: NAMES,
    rewritten=channels_last,
    swapped=frozenset({"vision_embedder.pos_embedding"}),
)
BEGINNINGS = tuple(
    (f"{model}{theirs}", own)
    for theirs, own in (
        ("embed_vision.multimodal_embedder.", "embed_vision."),
        ("embed_vision.embedding_projection.", "embed_vision.embedding_projection."),
        ("embed_vision.", "vision_embedder."),  # transformers names them so in memory
        ("vision_embedder.", "vision_embedder."),
    )
    for model in ("model.", "")
)
TOWERS = {"gemma4_unified": TowerFamily(config, DEFAULTS, UnifiedTower, manifest, BEGINNINGS, no_rows, mmproj=MMPROJ)}
