"""Gemma 4: norms before and after, rotary positions of two axes, and the average of 3 × 3 patches for each token."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.nn.linear import Linear, RMSNorm, norm_rows, parameter
from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.config import MAX_POSITIONS, MAX_SIZE, VisionConfig, VisionKeys, encoder
from rekindle._src.models.vision.family import GgufModel, MmprojForm, TowerFamily, pixel_order, rows_of, vision_keys
from rekindle._src.models.vision.inputs import PatchBatch, no_rows
from rekindle._src.models.vision.layers import (
    PatchHeads,
    PatchLayer,
    PatchPass,
    VisionTower,
    axial_frequencies,
    grouped,
    rope_tables,
    rotate,
)
from rekindle_kernels import gated

DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12, "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "pooling_kernel_size": 3, "patch_size": 16,
    "position_embedding_size": 10_240,
}  # fmt: skip
THETA = 100.0
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
MATRICES = {  # by their paths within a layer
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip
NORMS = {
    "attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
}  # fmt: skip


def config(keys: VisionKeys) -> VisionConfig:
    heads = keys.number("num_attention_heads", MAX_SIZE)
    keys.only("num_key_value_heads", heads)
    keys.only("attention_bias", False)
    made = encoder(
        keys,
        merge=keys.number("pooling_kernel_size", 64),
        out_size=keys.text.size("hidden_size"),
        positions=keys.number("position_embedding_size", MAX_POSITIONS),
        norm_eps=keys.epsilon("rms_norm_eps"),
        activation=keys.activation("hidden_activation"),
        rope_theta=keys.theta(THETA),
        clipped=keys.flag("use_clipped_linears"),
        standardized=keys.flag("standardize"),
    )
    if made.head_dim % 4:
        raise keys.wrong("head_dim", "a multiple of 4, which is rotated")
    return made


class ClippedLinear(Linear):
    """A linear layer with limits on its inputs and outputs, if the checkpoint has them."""

    def __init__(self, out_features: int, in_features: int, config: VisionConfig, precision: Precision) -> None:
        super().__init__(out_features, in_features, precision)
        self.bounds = nnx.data(parameter((len(BOUNDS),), jnp.float32) if config.clipped else None)

    def limited(self, x: Array) -> Array:
        """Compute the layer of x [..., in] → [..., out]."""
        if self.bounds is None:
            return self(x)
        low, high, least, most = self.bounds[...].astype(x.dtype)
        return jnp.clip(self(jnp.clip(x, low, high)), least, most)


class NormedPatchAttention(nnx.Module):
    """Attention among a picture's patches, with norms of each head of q, k and v; scores are not scaled."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        E, H, D = config.hidden_size, config.num_heads, config.head_dim
        self.q, self.k, self.v = (ClippedLinear(H * D, E, config, precision) for _ in range(3))
        self.out = ClippedLinear(E, H * D, config, precision)
        self.q_norm, self.k_norm = (RMSNorm(D, config.norm_eps, precision) for _ in range(2))
        self.heads, self.head_dim, self.eps = H, D, config.norm_eps
        self.implementation = precision.implementation

    def project(self, x: Array, shared: PatchPass) -> PatchHeads:
        assert shared.rope is not None, "heads are rotated"
        q, k, v = (part.limited(x).reshape(-1, self.heads, self.head_dim) for part in (self.q, self.k, self.v))
        q, k = rotate(self.q_norm(q), shared.rope), rotate(self.k_norm(k), shared.rope)
        v = norm_rows(v, None, self.eps, self.implementation)
        return PatchHeads(*(part.swapaxes(0, 1) for part in (q, k, v)))


class ClippedGatedMlp(nnx.Module):
    """A gated MLP with optional limits on its matrices."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        E, inner = config.hidden_size, config.intermediate_size
        self.gate, self.up = (ClippedLinear(inner, E, config, precision) for _ in range(2))
        self.down = ClippedLinear(E, inner, config, precision)
        self.activation = config.activation

    def __call__(self, x: Array) -> Array:
        return self.down.limited(gated(self.gate.limited(x), self.activation, self.up.limited(x)))


class PostNormedPatchBlock(PatchLayer):
    """A layer with norms before and after attention and MLP."""

    scale = 1.0

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm = (
            RMSNorm(config.hidden_size, config.norm_eps, precision) for _ in range(4)
        )
        self.attention = NormedPatchAttention(config, precision)
        self.mlp = ClippedGatedMlp(config, precision)

    def project(self, x: Array, shared: PatchPass) -> PatchHeads:
        with jax.named_scope("project"):
            return self.attention.project(self.attention_norm(x), shared)

    def mix(self, x: Array, y: Array) -> Array:
        with jax.named_scope("attend"):
            x = x + self.attention_out_norm(self.attention.out.limited(y))
        with jax.named_scope("mlp"):
            return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))


class Gemma4Tower(VisionTower):
    """The encoder of Gemma 4."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        E = config.hidden_size
        self.patch = Linear(E, config.patch_length, precision)
        self.positions = parameter((2, config.positions, E), precision.weights)  # of columns, and of rows
        self.layers = nnx.List([PostNormedPatchBlock(config, precision) for _ in range(config.num_layers)])
        self.mean, self.deviation = (
            nnx.data(parameter((E,), jnp.float32) if config.standardized else None) for _ in range(2)
        )
        self.projection = Linear(config.out_size, E, precision)
        self.implementation = precision.implementation

    def begin(self, batch: PatchBatch) -> tuple[Array, PatchPass]:
        table = self.positions[...]
        x = self.patch(2.0 * (jnp.asarray(batch.patches) - 0.5))
        x = x + table[0][batch.columns] + table[1][batch.rows]
        frequencies = axial_frequencies(self.config.head_dim, self.config.rope_theta)
        rope = rope_tables(batch, frequencies, columns_first=True, apart=True)
        return x.astype(self.stream), PatchPass(batch.starts, batch.stops, rope)

    def end(self, x: Array) -> Array:
        # In float32: the factor leads out of float16's range.
        pooled = jnp.mean(grouped(x, self.config).astype(jnp.float32), axis=1) * math.sqrt(self.config.hidden_size)
        if self.mean is not None and self.deviation is not None:
            pooled = (pooled - self.mean[...]) * self.deviation[...]
        normed = norm_rows(pooled, None, self.config.norm_eps, self.implementation)
        return self.projection(normed.astype(self.stream))


def manifest(config: VisionConfig) -> Manifest:
    E = config.hidden_size
    sources = {
        "patch.weight": one("vision_tower.patch_embedder.input_proj.weight", E),
        "positions": one("vision_tower.patch_embedder.position_embedding_table", 2),
        "projection.weight": one("embed_vision.embedding_projection.weight", config.out_size),
    }
    if config.standardized:
        sources |= {"mean": one("vision_tower.std_bias", E), "deviation": one("vision_tower.std_scale", E)}
    heads, inner = config.num_heads * config.head_dim, config.intermediate_size
    rows = {"attention.out": E, "mlp.gate": inner, "mlp.up": inner, "mlp.down": E}
    for layer in range(config.num_layers):
        path, name = f"layers.{layer}", f"vision_tower.encoder.layers.{layer}"
        for own, theirs in MATRICES.items():
            sources[f"{path}.{own}.weight"] = one(f"{name}.{theirs}.linear.weight", rows.get(own, heads))
            if config.clipped:
                bounds = tuple(f"{name}.{theirs}.{bound}" for bound in BOUNDS)
                sources[f"{path}.{own}.bounds"] = Source(names=bounds, rows=(1,) * len(bounds))
        for own, theirs in NORMS.items():
            size = config.head_dim if own.startswith("attention.") else E
            sources[f"{path}.{own}.weight"] = one(f"{name}.{theirs}.weight", size)
    return Manifest(sources, prefix="", ignored=(r"vision_tower\.encoder\.rotary_emb\..*",))


def read_mmproj(model: GgufModel) -> VisionConfig:
    heads = model.integer("attention.head_count")
    keys = {
        **vision_keys(model),
        "num_hidden_layers": model.layers,
        "num_attention_heads": heads,
        "head_dim": rows_of(model, "v.blk.0.attn_q.weight") // max(1, heads),
        "rms_norm_eps": model.number("attention.layer_norm_epsilon"),
        "pooling_kernel_size": model.integer("projector.scale_factor", 3),
        "position_embedding_size": rows_of(model, "v.position_embd.weight", 1),
        "use_clipped_linears": model.has("v.blk.0.attn_q.input_min"),
        "standardize": model.has("v.std_bias"),
    }
    text = {"hidden_size": rows_of(model, "mm.input_projection.weight")}
    return config(VisionKeys({"model_type": "gemma4", "vision_config": keys, "text_config": text}, DEFAULTS))


def channels_last(config: VisionConfig, name: str) -> TensorRewrite | None:
    """Return how the file has a patch: its channels one after the other, where a checkpoint has them by pixel."""
    if name != "vision_tower.patch_embedder.input_proj.weight":
        return None
    order = pixel_order(config)
    return TensorRewrite(shape=(config.hidden_size, config.patch_length), columns=order)


LAYER = "vision_tower.encoder.layers.{n}"
NAMES = {
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias", "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection": "mm.input_projection",
    **{
        f"{LAYER}.{theirs}{linear}": f"v.blk.{{n}}.{own}"
        for theirs, own in (
            ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_out"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        )
        for linear in ("", ".linear")
    },
    f"{LAYER}.self_attn.q_norm": "v.blk.{n}.attn_q_norm", f"{LAYER}.self_attn.k_norm": "v.blk.{n}.attn_k_norm",
    f"{LAYER}.input_layernorm": "v.blk.{n}.ln1", f"{LAYER}.post_attention_layernorm": "v.blk.{n}.attn_post_norm",
    f"{LAYER}.pre_feedforward_layernorm": "v.blk.{n}.ln2",
    f"{LAYER}.post_feedforward_layernorm": "v.blk.{n}.ffn_post_norm",
}  # fmt: skip
MMPROJ = MmprojForm(projector="gemma4v", read=read_mmproj, names=lambda config: NAMES, rewritten=channels_last)
BEGINNINGS = tuple(
    (f"{model}{part}.", f"{part}.") for part in ("vision_tower", "embed_vision") for model in ("model.", "")
)
TOWERS = {"gemma4": TowerFamily(config, DEFAULTS, Gemma4Tower, manifest, BEGINNINGS, no_rows, mmproj=MMPROJ)}
