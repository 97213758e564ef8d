"""A model's config as the metadata of a GGUF file, and as the tensors that say how it rotates.

A model is refused where it needs a key that llama.cpp lacks, or differs from what llama.cpp knows by the architecture
alone: the file would open as another model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.family import GgufForm
from rekindle._src.models.nn.rope import RopeSpec
from rekindle._src.models.registry import gguf_form
from rekindle.errors import UnsupportedModel

Tensors = dict[str, NDArray[np.float32]]


def describe(config: ModelConfig) -> tuple[dict[str, Any], Tensors]:
    """Return the metadata of the architecture, and extra tensors.

    Raise `UnsupportedModel` for a model that llama.cpp can't express.
    """
    form = gguf_form(config.model_type)
    if form.reads_only:
        raise _refuse(config, form.reads_only)
    if config.only_embeds:
        raise _refuse(config, "it is for embeddings alone, which the file's architecture does not say")
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{form.norm}": config.norm_eps,
        **_experts(config, form),
        **_windows(config, form),
        **form.fields(config),
    }
    rope, tensors = _rope(config, form)
    fields |= rope
    for name, cap in (("final_logit_softcapping", config.final_soft_cap), *_attention_cap(config)):
        if cap is not None:
            fields[name] = float(cap)
    _check(config, form)
    arch = form.architecture
    general = {"general.architecture": arch, "general.type": "model"}
    return general | {f"{arch}.{name}": value for name, value in fields.items()}, tensors


def _refuse(config: ModelConfig, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"this {config.model_type} model can't be a GGUF file: {what}. Export it as a folder of safetensors."
    )


def _experts(config: ModelConfig, form: GgufForm) -> dict[str, Any]:
    specs = {spec for spec in config.moe if spec is not None}
    if not specs:
        return {}
    if len(specs) > 1 or None in config.moe:
        raise _refuse(config, "it has layers without experts, or with different ones")
    (spec,) = specs
    if not spec.normalize:
        raise _refuse(config, "llama.cpp normalizes the weights of the chosen experts, and norm_topk_prob is false")
    fields = {"expert_count": spec.num_experts, "expert_used_count": spec.top_k}
    return fields | ({"expert_feed_forward_length": spec.intermediate_size} if form.expert_length else {})


def _attention_cap(config: ModelConfig) -> list[tuple[str, float | None]]:
    caps = {spec.soft_cap for spec in config.attention}
    if len(caps) > 1:
        raise _refuse(config, "its layers cap scores differently")
    return [("attn_logit_softcapping", cap) for cap in caps]


def _windows(config: ModelConfig, form: GgufForm) -> dict[str, Any]:
    sizes = [spec.sliding_window for spec in config.attention]
    windows = {size for size in sizes if size is not None}
    if not windows:
        return {}
    if len(windows) > 1:
        raise _refuse(config, "its layers have sliding windows of different sizes")
    (size,) = windows
    try:
        return {"attention.sliding_window": size, **form.windows([window is not None for window in sizes])}
    except ValueError as error:
        raise _refuse(config, str(error)) from None


def _rope(config: ModelConfig, form: GgufForm) -> tuple[dict[str, Any], Tensors]:
    if not any(form.rotates(layer) for layer in range(config.num_layers)):
        return {}, {}
    spec = _main_rope(config)
    fields: dict[str, Any] = {"rope.freq_base": spec.theta, "rope.dimension_count": spec.dim}
    local = {layer.rope for layer in config.attention if layer.sliding_window} - {spec, None}
    if local and form.local_rope:
        (local_rope,) = local
        assert local_rope is not None, "None was taken away"
        if local_rope.kind != "default":
            raise _refuse(config, "the rope of its local layers is scaled")
        fields["rope.freq_base_swa"] = local_rope.theta
    tensors: Tensors = {}
    if spec.kind in ("llama3", "factors"):
        plain = RopeSpec(theta=spec.theta, dim=spec.dim)
        exact = spec.kind == "factors"
        stretch = np.asarray(spec.short_factor) if exact else plain.frequencies() / spec.frequencies()
        tensors["rope_freqs.weight"] = stretch.astype(np.float32)
    elif spec.kind == "longrope":
        tensors["rope_factors_long.weight"] = np.asarray(spec.long_factor, np.float32)
        tensors["rope_factors_short.weight"] = np.asarray(spec.short_factor, np.float32)
        fields["rope.scaling.attn_factor"] = spec.attention_factor
        fields["rope.scaling.original_context_length"] = spec.original_length
    elif spec.kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": spec.kind, "rope.scaling.factor": spec.factor}
        if spec.kind == "yarn":
            fields |= _yarn(config, spec)
    elif spec.kind != "default":
        raise _refuse(config, f"llama.cpp has no {spec.kind!r} rope")
    return fields, tensors


def _yarn(config: ModelConfig, spec: RopeSpec) -> dict[str, Any]:
    if not spec.truncate:
        raise _refuse(config, "llama.cpp rounds the ramp of YaRN, and truncate is false")
    usual = 0.1 * float(np.log(spec.factor)) + 1.0
    return {
        "rope.scaling.original_context_length": spec.original_length,
        "rope.scaling.attn_factor": spec.attention_factor / usual,
        "rope.scaling.yarn_beta_fast": spec.beta_fast,
        "rope.scaling.yarn_beta_slow": spec.beta_slow,
    }


def _main_rope(config: ModelConfig) -> RopeSpec:
    """Return the rope of the layers that see everything, or of all layers."""
    wide = [layer for layer in config.attention if layer.sliding_window is None and layer.rope is not None]
    ropes = {layer.rope for layer in wide or config.attention} - {None}
    if len(ropes) != 1:
        raise _refuse(config, "its layers have different ropes")
    (spec,) = ropes
    assert spec is not None, "None was taken away"
    return spec


def _check(config: ModelConfig, form: GgufForm) -> None:
    """Raise `UnsupportedModel` if the model differs from what llama.cpp knows by the architecture alone."""
    scales = {spec.scale for spec in config.attention}
    usual = float(form.scale_dim(config) ** -0.5)
    if not form.scales and (len(scales) > 1 or not np.isclose(max(scales), usual, rtol=1e-6)):
        raise _refuse(config, f"llama.cpp multiplies its scores by {usual:.6g}, and here it is {max(scales):.6g}")
    wrong = [n for n, spec in enumerate(config.attention) if (spec.rope is not None) != form.rotates(n)]
    if wrong:
        does = "does not rotate" if form.rotates(wrong[0]) else "rotates"
        raise _refuse(config, f"layer {wrong[0]} {does}, and in llama.cpp it is the other way round")
    if config.activation != form.activation:
        raise _refuse(
            config, f"llama.cpp computes it with {form.activation}, and its activation is {config.activation}"
        )
