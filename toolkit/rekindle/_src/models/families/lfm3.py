"""LFM3: LFM2 with norms after both halves of a block, a window in some layers, and a gate for each head."""

from __future__ import annotations

from rekindle._src.models.config import AttentionSpec, ModelConfig, RecurrentSpec
from rekindle._src.models.families.lfm2 import OUTER_NORM, mlp_sources, norm_sources
from rekindle._src.models.families.lfm2 import mixer_sources as lfm2_sources
from rekindle._src.models.families.llama import attention_sources, manifest_of, norms_of, qk_norm_sources
from rekindle._src.models.family import Family, decoder_of
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import Span, column

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def config(keys: Keys) -> ModelConfig:
    keys.only("conv_bias", False)
    keys.only("use_sandwich_norm", True)
    keys.only("use_attention_gate", True)
    keys.raw.setdefault("rope_parameters", ROPES)
    hidden, layers, head_dim = keys.size("hidden_size"), keys.size("num_hidden_layers"), keys.size("head_dim")
    state = RecurrentSpec(channels=hidden, taps=keys.size("conv_L_cache", 7))
    default = [
        "full_attention" if layer % 4 == 2 else "sliding_attention" if layer % 4 == 0 and layer > 0 else "conv"
        for layer in range(layers)
    ]
    kinds = keys.kinds_of_layers(default, "conv", "full_attention", "sliding_attention")
    everywhere, nearby = (
        AttentionSpec(scale=head_dim**-0.5, sliding_window=window, rope=keys.rope(head_dim, layer_type=kind))
        for kind, window in (("full_attention", None), ("sliding_attention", keys.window(256)))
    )
    return decoder(
        keys,
        norm_eps=keys.get("norm_eps", 1e-5),
        tie=True,
        activation="silu",
        attention_bias=keys.get("attention_bias", False),
        attention=tuple(nearby if kind == "sliding_attention" else everywhere for kind in kinds),
        recurrent=tuple(state if kind == "conv" else None for kind in kinds),
    )


module = decoder_of("ConvolutionSandwichBlock")


def mixer_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    if config.states[layer] is not None:
        return lfm2_sources(config, layer)
    heads, name = config.num_heads, f"model.layers.{layer}.self_attn.gate_proj.weight"
    gate = {"attention.gate.weight": one(name, heads, role=column(Span(heads, heads)))}
    return attention_sources(config, layer) | qk_norm_sources(config, layer) | gate


sandwich_sources = norms_of(attention_out_norm="post_operator_norm", mlp_out_norm="post_ffn_norm")
manifest = manifest_of(mixer_sources, norm_sources, sandwich_sources, mlp_sources, norm=OUTER_NORM)
ALIASES = {"rms_norm_eps": "norm_eps"}
FAMILY = Family("Lfm3ForCausalLM", config, module, manifest, ALIASES)
