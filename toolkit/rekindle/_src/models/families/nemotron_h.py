"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without a rope, an MLP, or a mixture of experts.

Steps of Mamba-2 are bounded by `time_step_limit` alone, which has to be (0, inf) here; `time_step_min` is for the
initial values of training. vLLM has no bound (`dt_limit=(0.0, inf)` in its Mamba-2 mixer). In transformers 5.24 prompts
have steps of at least `time_step_min`, as Zamba2's do, while tokens that are generated one by one have not. That is a
defect by https://github.com/huggingface/transformers/pull/48989, which compared it with the authors' published code.
"""

from __future__ import annotations

import functools
from typing import Any

from rekindle._src.models import roles
from rekindle._src.models.config import AttentionSpec, ModelConfig, MoeSpec, Pages, RecurrentSpec
from rekindle._src.models.families import granitemoehybrid
from rekindle._src.models.families.llama import attention_sources, blocks, plain_mlp
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.roles import Span, column, row, vocab
from rekindle.errors import UnsupportedModel

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
OLDER = {"mamba": MAMBA, "attention": ATTENTION}
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}  # of `hybrid_override_pattern`


def config(keys: ConfigKeys) -> ModelConfig:
    for bias in ("use_bias", "mlp_bias", "mamba_proj_bias", "attention_bias"):
        keys.only(bias, False)
    keys.only("use_conv_bias", True)
    keys.only("mamba_hidden_act", "silu")
    keys.only("sliding_window")
    kinds = _kinds(keys)
    state, spec = _state(keys), _experts(keys) if EXPERTS in kinds else None
    head_dim, kv_heads = keys.size("head_dim", 128), keys.size("num_key_value_heads", keys.size("num_attention_heads"))
    inner = keys.size("intermediate_size", spec.intermediate_size if spec else None)
    sizes = {MLP: inner, EXPERTS: 0 if spec is None else spec.intermediate_size}
    return decoder(
        keys,
        num_kv_heads=kv_heads,
        kv_heads_implied=True,
        head_dim=head_dim,
        intermediate_size=inner,
        activation=keys.activation("mlp_hidden_act", "relu2"),
        norm_eps=keys.get("layer_norm_epsilon", 1e-5),
        attention=(AttentionSpec(scale=head_dim**-0.5),) * len(kinds),
        recurrent=tuple(state if kind == MAMBA else None for kind in kinds),
        pages=tuple(Pages(kv_heads, head_dim, head_dim) if kind == ATTENTION else None for kind in kinds),
        moe=tuple(spec if kind == EXPERTS else None for kind in kinds) if spec else (),
        mlp_sizes=tuple(sizes.get(kind, 0) for kind in kinds),
        tie_embeddings=False,
    )


def _kinds(keys: ConfigKeys) -> tuple[str, ...]:
    """Return the kind of each layer. Raise `UnsupportedModel` for others, and for models without attention."""
    pattern = keys.get("hybrid_override_pattern", "")
    names = keys.get("layer_types") or [LETTERS.get(letter, letter) for letter in pattern]
    names = names or [MAMBA, EXPERTS, ATTENTION, MLP]
    keys.raw["num_hidden_layers"] = len(names)
    keys.size("num_hidden_layers")
    keys.raw["layer_types"] = [OLDER.get(name, name) for name in names]
    kinds = keys.kinds_of_layers(names, *LETTERS.values())
    if ATTENTION not in kinds:
        raise UnsupportedModel("layers_block_type has no attention, and models of states alone are not implemented.")
    return kinds


def _state(keys: ConfigKeys) -> RecurrentSpec:
    granitemoehybrid.check_steps(keys)
    count, size = keys.size("mamba_num_heads", 128), keys.size("mamba_head_dim", 64)
    groups, numbers = keys.size("n_groups", 8), keys.size("ssm_state_size", 128)
    return RecurrentSpec(
        channels=count * size + 2 * groups * numbers,
        kernel=keys.size("conv_kernel", 4),
        key_heads=groups,
        heads=count,
        key_size=numbers,
        value_size=size,
    )


def _experts(keys: ConfigKeys) -> MoeSpec:
    return MoeSpec(
        num_experts=keys.size("n_routed_experts", 8),
        top_k=keys.size("num_experts_per_tok", 2),
        intermediate_size=keys.size("moe_intermediate_size"),
        normalize=keys.get("norm_topk_prob", True),
        epsilon=1e-20,
        scoring="sigmoid",
        correction=True,
        scale=float(keys.get("routed_scaling_factor", 1.0)),
        groups=keys.size("n_group", 1),
        top_groups=keys.size("topk_group", 1),
        shared_size=keys.size("moe_shared_expert_intermediate_size"),
        gated=False,
        latent_size=keys.size("moe_latent_size") if keys.get("moe_latent_size") else 0,
    )


module = decoder_of("SingleBlock")


def layer_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, state, E = f"backbone.layers.{layer}", config.states[layer], config.hidden_size
    norm, mixer = {"norm.weight": one(f"{prefix}.norm.weight", E)}, f"{prefix}.mixer"
    if state is not None:
        return norm | granitemoehybrid.state_sources(state, E, "attention", mixer)
    if config.pages[layer] is not None:
        return norm | attention_sources(config, layer, mixer)
    spec = config.moe[layer] if config.moe else None
    return norm | (plain_mlp(config, config.mlp_size(layer), mixer) if spec is None else _moe(config, spec, mixer))


def _moe(config: ModelConfig, spec: MoeSpec, prefix: str) -> dict[str, Source]:
    hidden, inner, numbers = config.hidden_size, spec.intermediate_size, range(spec.num_experts)
    width = spec.latent_size or hidden
    of_experts = functools.partial(roles.experts, spec.num_experts)

    def stack(name: str, rows: int, role: roles.Role) -> Source:
        names = tuple(f"{prefix}.experts.{number}.{name}.weight" for number in numbers)
        return Source(names=names, rows=(rows,), stack=True, role=of_experts(role))

    sources = {
        "mlp.router.weight": one(f"{prefix}.gate.weight", spec.num_experts),
        "mlp.correction": one(f"{prefix}.gate.e_score_correction_bias", spec.num_experts),
        "mlp.gate_up.weight": stack("up_proj", inner, column(Span(inner))),
        "mlp.down.weight": stack("down_proj", width, row(inner)),
    }
    if spec.latent_size:
        sources["mlp.narrow.weight"] = one(f"{prefix}.fc1_latent_proj.weight", width)
        sources["mlp.widen.weight"] = one(f"{prefix}.fc2_latent_proj.weight", hidden)
    return sources | plain_mlp(config, spec.shared_size, f"{prefix}.shared_experts", module="mlp.shared.")


def manifest(config: ModelConfig) -> Manifest:
    V = config.vocab_size
    outer = {
        "embed.weight": one("backbone.embeddings.weight", V, role=vocab(V)),
        "norm.weight": one("backbone.norm_f.weight", config.hidden_size),
        "head.weight": one("lm_head.weight", V, role=vocab(V)),
    }
    return Manifest(
        outer | blocks(config, layer_sources),
        prefix="backbone.",
        others={"backbone.embedding.weight": "backbone.embeddings.weight"},
    )


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = model.decoder("layer_norm_rms_epsilon", "expert_shared_count", "expert_group_count", gaps=True)
    states = granitemoehybrid.gguf_state(model)
    lengths, count = model.each("feed_forward_length"), model.integer("expert_count", 0)
    kinds = [
        ATTENTION if attends else MAMBA if model.has(f"blk.{layer}.ssm_in.weight") else MLP
        for layer, attends in enumerate(model.attends())
    ]
    kinds = [EXPERTS if model.has(f"blk.{layer}.ffn_gate_inp.weight") else kind for layer, kind in enumerate(kinds)]
    found = keys | {
        "layer_norm_epsilon": keys["rms_norm_eps"],
        "layers_block_type": kinds,
        "attention_bias": False,  # stating it changes the fingerprint: caches of earlier versions hold permuted keys
        "intermediate_size": max(lengths),
        "mamba_num_heads": states["mamba_n_heads"],
        "mamba_head_dim": states["mamba_d_head"],
        "n_groups": states["mamba_n_groups"],
        "ssm_state_size": states["mamba_d_state"],
        "conv_kernel": states["mamba_d_conv"],
    }
    if not count:
        return found
    return found | {
        "n_routed_experts": count,
        "num_experts_per_tok": model.integer("expert_used_count"),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": model.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": model.integer("moe_latent_size", 0),
        "norm_topk_prob": bool(model.get("expert_weights_norm", True)),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "n_group": model.integer("expert_group_count", 1) or 1,
        "topk_group": model.integer("expert_group_used_count", 1) or 1,
    }


def rewritten(config: ModelConfig, layer: int, name: str) -> TensorRewrite | None:
    return granitemoehybrid.rewritten_state(config, layer, name) if name.startswith("mixer.") else None


NAMES = {
    **granitemoehybrid.state_names("mixer"), **{f"mixer.{x}_proj": f"attn_{x}" for x in "qkv"}, "norm": "attn_norm",
    "mixer.o_proj": "attn_output", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp", "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp", "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}  # fmt: skip
GGUF = GgufForm(
    architecture="nemotron_h",
    others=("nemotron_h_moe",),
    read=read_gguf,
    names=NAMES,
    tensors=granitemoehybrid.state_tensors("mixer"),
    rewritten=rewritten,
    paired=True,
    activation="relu2",
    reads_only="rekindle does not write states' matrices",
)
ALIASES = {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"}
FAMILIES = {"nemotron_h": Family("NemotronHForCausalLM", config, module, manifest, ALIASES, GGUF)}
