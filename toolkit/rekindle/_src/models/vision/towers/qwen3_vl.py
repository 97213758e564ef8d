"""Qwen3-VL and Qwen3.5: pictures of any size, learned positions and rotary ones; Qwen3-VL has deepstack levels."""

from __future__ import annotations

from flax import nnx
from jax import Array

from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.nn.layers import LayerNorm
from rekindle._src.models.nn.linear import Linear
from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.config import MAX_SIZE, VisionConfig, VisionKeys, encoder
from rekindle._src.models.vision.family import GgufModel, MmprojForm, TowerFamily, rows_of, vision_keys, with_bias
from rekindle._src.models.vision.inputs import PatchBatch, bilinear_rows
from rekindle._src.models.vision.layers import (
    PatchBlock,
    PatchMlp,
    PatchPass,
    PositionTable,
    VisionTower,
    axial_frequencies,
    grouped,
    rope_tables,
)

DEFAULTS = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}  # fmt: skip
WITH_LEVELS = {**DEFAULTS, "deepstack_visual_indexes": (8, 16, 24)}
ALIASES = {"num_heads": "num_attention_heads", "depth": "num_hidden_layers"}
EPSILON = 1e-6  # of all norms, whatever files say


def config(keys: VisionKeys) -> VisionConfig:
    layers = keys.number("depth", 1024)
    levels = keys.model_type.startswith("qwen3_vl")
    made = encoder(
        keys,
        layers="depth",
        heads="num_heads",
        channels=keys.number("in_channels", 16),
        frames=keys.number("temporal_patch_size", 16),
        merge=keys.number("spatial_merge_size", 64),
        out_size=keys.number("out_hidden_size", MAX_SIZE),
        positions=keys.square("num_position_embeddings"),
        norm_eps=EPSILON,
        activation=keys.activation("hidden_act"),
        rope_theta=keys.theta(10_000.0),
        deepstack=keys.layers_of("deepstack_visual_indexes", layers) if levels else (),
    )
    if made.head_dim % 4:
        raise keys.wrong("hidden_size", "a number of heads with sizes that are multiples of 4, which are rotated")
    return made


class PatchMerger(nnx.Module):
    """The projector: a norm of patches, or `after` they are joined of tokens, and an MLP."""

    def __init__(self, config: VisionConfig, precision: Precision, *, after: bool = False) -> None:
        size = config.hidden_size * config.patches_of_token
        self.config = config
        self.norm = LayerNorm(size if after else config.hidden_size, EPSILON)
        self.mlp = PatchMlp((size, size, config.out_size), "gelu", precision)
        self.after = after

    def __call__(self, x: Array) -> Array:
        patches = grouped(x, self.config)
        if not self.after:
            patches = self.norm(patches)
        tokens = patches.reshape(len(patches), -1)
        return self.mlp(self.norm(tokens) if self.after else tokens)


class QwenTower(VisionTower):
    """The encoder of Qwen3-VL and Qwen3.5."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        self.patch = Linear(config.hidden_size, config.patch_length, precision, bias=True)
        self.positions = PositionTable(config, precision)
        self.layers = nnx.List([PatchBlock(config, precision) for _ in range(config.num_layers)])
        self.merger = PatchMerger(config, precision)
        self.mergers = nnx.List([PatchMerger(config, precision, after=True) for _ in config.deepstack])

    def begin(self, batch: PatchBatch) -> tuple[Array, PatchPass]:
        x = self.patch(batch.patches) + self.positions(batch)
        frequencies = axial_frequencies(self.config.head_dim, self.config.rope_theta)
        rope = rope_tables(batch, frequencies, columns_first=False, apart=False)
        return x.astype(self.stream), PatchPass(batch.starts, batch.stops, rope)

    def end(self, x: Array) -> Array:
        return self.merger(x)

    def level(self, number: int, x: Array) -> Array:
        return self.mergers[number](x)


def manifest(config: VisionConfig) -> Manifest:
    E, X, joined_size = config.hidden_size, config.out_size, config.hidden_size * config.patches_of_token
    sources = {
        "patch.weight": one("visual.patch_embed.proj.weight", E),
        "patch.bias": one("visual.patch_embed.proj.bias", E),
        "positions.weight": one("visual.pos_embed.weight", config.positions),
        **_merger("merger", "visual.merger", E, joined_size, X),
    }
    for number in range(len(config.deepstack)):
        sources |= _merger(f"mergers.{number}", f"visual.deepstack_merger_list.{number}", joined_size, joined_size, X)
    for layer in range(config.num_layers):
        path, name = f"layers.{layer}", f"visual.blocks.{layer}"
        rows = 3 * config.num_heads * config.head_dim
        sources |= with_bias(f"{path}.attention_norm", f"{name}.norm1", E)
        sources |= with_bias(f"{path}.attention.qkv", f"{name}.attn.qkv", rows)
        sources |= with_bias(f"{path}.attention.out", f"{name}.attn.proj", E)
        sources |= with_bias(f"{path}.mlp_norm", f"{name}.norm2", E)
        sources |= with_bias(f"{path}.mlp.up", f"{name}.mlp.linear_fc1", config.intermediate_size)
        sources |= with_bias(f"{path}.mlp.down", f"{name}.mlp.linear_fc2", E)
    return Manifest(sources, prefix="", ignored=(r"visual\.rotary_pos_emb\.inv_freq",))


def _merger(path: str, name: str, normed: int, inner: int, outputs: int) -> dict[str, Source]:
    return {
        **with_bias(f"{path}.norm", f"{name}.norm", normed),
        **with_bias(f"{path}.mlp.up", f"{name}.linear_fc1", inner),
        **with_bias(f"{path}.mlp.down", f"{name}.linear_fc2", outputs),
    }


def read_mmproj(model: GgufModel) -> VisionConfig:
    # The file's epsilon is the language model's: the converter writes it in place of the encoder's own.
    deepstack = model.get("is_deepstack_layers", ())
    keys = {
        **vision_keys(model),
        "depth": model.layers,
        "num_heads": model.integer("attention.head_count"),
        "spatial_merge_size": model.integer("spatial_merge_size", 2),
        "out_hidden_size": rows_of(model, "mm.2.weight"),
        "num_position_embeddings": rows_of(model, "v.position_embd.weight"),
        "deepstack_visual_indexes": [layer for layer, has in enumerate(deepstack) if has],
    }
    return config(VisionKeys({"model_type": "qwen3_vl", "vision_config": keys}, DEFAULTS))


NAMES = {
    "visual.patch_embed.proj": "v.patch_embd", "visual.pos_embed": "v.position_embd", "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0", "visual.merger.linear_fc2": "mm.2",
    "visual.blocks.{n}.norm1": "v.blk.{n}.ln1", "visual.blocks.{n}.norm2": "v.blk.{n}.ln2",
    "visual.blocks.{n}.attn.qkv": "v.blk.{n}.attn_qkv", "visual.blocks.{n}.attn.proj": "v.blk.{n}.attn_out",
    "visual.blocks.{n}.mlp.linear_fc1": "v.blk.{n}.ffn_up", "visual.blocks.{n}.mlp.linear_fc2": "v.blk.{n}.ffn_down",
}  # fmt: skip


def names(config: VisionConfig) -> dict[str, str]:
    """Return llama.cpp's names; a level's names have the number of its layer."""
    levels = {
        f"visual.deepstack_merger_list.{number}.{part}": f"v.deepstack.{layer}.{theirs}"
        for number, layer in enumerate(config.deepstack)
        for part, theirs in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2"))
    }
    return NAMES | levels


MMPROJ = MmprojForm(
    projector="qwen3vl_merger",
    read=read_mmproj,
    names=names,
    frames={"visual.patch_embed.proj.weight": ("v.patch_embd.weight", "v.patch_embd.weight.1")},
)
_WITHOUT_LEVELS = TowerFamily(
    config, DEFAULTS, QwenTower, manifest, (("model.visual.", "visual."), ("visual.", "visual.")), bilinear_rows,
    blocks=True, mmproj=MMPROJ, aliases=ALIASES,
)  # fmt: skip
_LEVELS = _WITHOUT_LEVELS._replace(defaults=WITH_LEVELS)
TOWERS = {
    "qwen3_vl": _LEVELS, "qwen3_vl_moe": _LEVELS, "qwen3_5": _WITHOUT_LEVELS, "qwen3_5_moe": _WITHOUT_LEVELS,
}  # fmt: skip
