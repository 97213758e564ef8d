"""LFM2-VL: SigLIP 2 for pictures of any shape, with a resized table of positions; a token joins 2 × 2 patches."""

from __future__ import annotations

from flax import nnx
from jax import Array

from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Manifest
from rekindle._src.models.nn.layers import LayerNorm
from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.config import MAX_SIZE, VisionConfig, VisionKeys
from rekindle._src.models.vision.family import GgufModel, MmprojForm, TowerFamily, pixel_order, rows_of, with_bias
from rekindle._src.models.vision.inputs import resized_weights
from rekindle._src.models.vision.layers import PatchMlp
from rekindle._src.models.vision.siglip import (
    DEFAULTS,
    SiglipTower,
    siglip,
    siglip_keys,
    siglip_names,
    siglip_sources,
    unused,
)
from rekindle.errors import UnsupportedModel

PREFIX, PROJECTOR = "vision_tower", "multi_modal_projector"
OWN_DEFAULTS = {**DEFAULTS, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16, "num_patches": 256}
LAYER_NORM_EPSILON = 1e-5  # PyTorch's own


def config(keys: VisionKeys) -> VisionConfig:
    whole = keys.whole_model
    inner = whole.size("projector_hidden_size", 2560)
    if inner > MAX_SIZE * 4:
        raise UnsupportedModel(f"projector_hidden_size={inner:,} is more than {MAX_SIZE * 4:,}. Check config.json.")
    for flag in ("projector_use_layernorm", "projector_bias"):
        whole.only(flag, True, False)
    whole.only("vision_feature_layer", -1)
    return siglip(
        keys,
        whole.size("downsample_factor", 2),
        positions=keys.square("num_patches", 1 << 14),
        projector_size=inner,
        projector_norm=whole.get("projector_use_layernorm", True),
        projector_bias=whole.get("projector_bias", True),
        projector_activation=whole.activation("projector_hidden_act", "gelu"),
    )


class Lfm2Tower(SiglipTower):
    """The encoder of LFM2-VL, with its projector."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        size = config.hidden_size * config.patches_of_token
        self.token_norm = nnx.data(LayerNorm(size, LAYER_NORM_EPSILON) if config.projector_norm else None)
        self.projector = PatchMlp(
            (size, config.projector_size, config.out_size),
            config.projector_activation,
            precision,
            bias=config.projector_bias,
        )

    def project(self, patches: Array) -> Array:
        tokens = patches.reshape(len(patches), -1)
        return self.projector(tokens if self.token_norm is None else self.token_norm(tokens))


def manifest(config: VisionConfig) -> Manifest:
    size, bias = config.hidden_size * config.patches_of_token, config.projector_bias
    sources = siglip_sources(config, PREFIX)
    if config.projector_norm:
        sources |= with_bias("token_norm", f"{PROJECTOR}.layer_norm", size)
    sources |= with_bias("projector.up", f"{PROJECTOR}.linear_1", config.projector_size, bias=bias)
    sources |= with_bias("projector.down", f"{PROJECTOR}.linear_2", config.out_size, bias=bias)
    return Manifest(sources, prefix="", ignored=unused(PREFIX))


def read_mmproj(model: GgufModel) -> VisionConfig:
    whole = {
        "model_type": "lfm2_vl",
        "vision_config": siglip_keys(model),
        "text_config": {"hidden_size": rows_of(model, "mm.2.weight")},
        "downsample_factor": model.integer("projector.scale_factor", 2),
        "projector_hidden_size": rows_of(model, "mm.1.weight"),
        "projector_use_layernorm": model.has("mm.input_norm.weight"),
        "projector_bias": model.has("mm.1.bias"),
    }
    return config(VisionKeys(whole, OWN_DEFAULTS))


def channels_last(config: VisionConfig, name: str) -> TensorRewrite | None:
    """Return how the file has a patch: its channels one after the other, where a checkpoint has them by pixel."""
    if name != f"{PREFIX}.embeddings.patch_embedding.weight":
        return None
    order = pixel_order(config)
    return TensorRewrite(shape=(config.hidden_size, config.patch_length), columns=order)


NAMES = siglip_names(PREFIX) | {
    f"{PROJECTOR}.layer_norm": "mm.input_norm", f"{PROJECTOR}.linear_1": "mm.1", f"{PROJECTOR}.linear_2": "mm.2",
}  # fmt: skip
MMPROJ = MmprojForm(projector="lfm2", read=read_mmproj, names=lambda config: NAMES, rewritten=channels_last)
BEGINNINGS = tuple(
    (f"{model}{theirs}.", f"{own}.")
    for theirs, own in (("vision_tower.vision_model", PREFIX), ("vision_tower", PREFIX), (PROJECTOR, PROJECTOR))
    for model in ("model.", "")
)
TOWERS = {"lfm2_vl": TowerFamily(config, OWN_DEFAULTS, Lfm2Tower, manifest, BEGINNINGS, resized_weights, mmproj=MMPROJ)}
