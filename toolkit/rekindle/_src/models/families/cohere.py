"""Cohere (Command R): Cohere2 without windows, so that all layers rotate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.cohere2 import NORM, logit_scale, manifest, module
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    keys.only("use_qk_norm", False)
    head_dim = keys.size("head_dim", keys.size("hidden_size") // keys.size("num_attention_heads"))
    rope = dataclasses.replace(keys.rope(head_dim, theta=500_000.0), interleaved=True)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope)
    bias = keys.get("attention_bias", False)
    return decoder(
        keys,
        kv_heads_implied=True,
        tie=True,
        norm_eps=keys.get("layer_norm_eps", 1e-5),
        attention=(spec,) * keys.size("num_hidden_layers"),
        logit_scale=float(keys.get("logit_scale", 0.0625)),
        qkv_bias=bias,
        o_bias=bias,
    )


def read_gguf(model: GgufModel) -> dict[str, Any]:
    shared = model.decoder(NORM)
    keys = {"layer_norm_eps": shared.pop("rms_norm_eps"), "logit_scale": model.number("logit_scale")}
    return shared | keys | model.rope(theta=500_000.0)


GGUF = GgufForm(architecture="command-r", read=read_gguf, norm=NORM, fields=logit_scale)
FAMILY = Family("CohereForCausalLM", config, module, manifest, gguf=GGUF)
