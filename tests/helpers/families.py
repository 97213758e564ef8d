"""The cases of each family that tests compare with transformers, with what a GGUF file can hold of them.

A family's entry in FAMILY_CASES is what `family` makes of its model_type, its architecture, its cases by name (what
each is there for stands in its name) and the options in which they differ from SIZES. The prompts of the parity tests
have 24 tokens, 64 more are generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


class Family(NamedTuple):
    """The configs of a family by name."""

    cases: dict[str, dict[str, Any]]
    embeds: dict[str, dict[str, Any]]  # of models that embed only, which generate nothing to compare: `embedders`
    held: dict[str, dict[str, Any]]  # cases that a GGUF file can hold, some with the one option changed that it can't
    refused: dict[str, str]  # cases that no GGUF file can hold, and what the error says of them
    implied: frozenset[str]  # keys of sizes that other keys imply; every other size has to be in the file


FAMILY_CASES: dict[str, Family] = {}  # by model_type


def case(model_type: str, architecture: str, **options: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **SIZES, **options}


def family(
    model_type: str,
    architecture: str,
    cases: Mapping[str, Mapping[str, Any]],
    *,
    held: Sequence[str] | Mapping[str, dict[str, Any]] = (),
    refused: str | dict[str, str] = "",
    implied: str = "",
    without: str = "",
    sizes: Mapping[str, Any] = SIZES,
    embeds: bool = False,
) -> None:
    """Enter a family. `held` are the cases that a GGUF file can hold, by name, or with the option that it can't hold.

    `refused` is what the error says of the others, by name or of every case: a family that no GGUF file can hold has
    that alone. `without` is a size that no case has.
    """
    made = {
        name: {"model_type": model_type, "architectures": [architecture], **sizes, **options}
        for name, options in cases.items()
    }
    for raw in made.values():
        raw.pop(without, None)
    names = held if isinstance(held, Mapping) else {name: {} for name in held}
    words = refused if isinstance(refused, dict) else dict.fromkeys(made if refused else (), refused)
    each = ({}, made) if embeds else (made, {})
    FAMILY_CASES[model_type] = Family(*each, dict(names), words, frozenset(implied.split()))


HEADS = "head_dim num_key_value_heads"  # which other keys imply
TIED = {"tie_word_embeddings": True}


def scaled(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_scaling": {"rope_type": kind, "factor": 4.0, **options}}


family(
    "llama", "LlamaForCausalLM", {
        "llama": {},
        "llama-mha-tied": {"num_key_value_heads": 6, **TIED},
        "llama-mqa-five-heads": {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1},
        "llama-wide-heads": {"head_dim": 20},
        "llama-biases": {"attention_bias": True, "mlp_bias": True},
        "llama-linear-rope": scaled("linear"),
        "llama-dynamic-rope-past-length": {**scaled("dynamic"), "max_position_embeddings": 16},
        "llama-dynamic-rope-crossing": {**scaled("dynamic"), "max_position_embeddings": 48},
        "llama3-rope": scaled(
            "llama3", original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0
        ),
        "llama-yarn": scaled("yarn", original_max_position_embeddings=16),
        "llama-yarn-mscale": scaled(
            "yarn", original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3, truncate=False, beta_fast=4.0
        ),
        "smollm2": {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, **TIED},
    },
    held=(
        "llama", "llama-mha-tied", "llama-mqa-five-heads", "llama-wide-heads", "llama-biases", "llama-linear-rope",
        "llama3-rope", "llama-yarn", "smollm2",
    ),
    refused={"llama-dynamic-rope-crossing": "dynamic", "llama-yarn-mscale": "truncate"}, implied=HEADS,
)  # fmt: skip
family(
    "apertus", "ApertusForCausalLM", {
        "apertus": {
            "num_key_value_heads": 3,
            **scaled("llama3", original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
        },
        "apertus-biases": {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    held=["apertus", "apertus-biases"], implied=HEADS,
)  # fmt: skip
family("arcee", "ArceeForCausalLM", {"arcee": {}}, held=["arcee"], implied=HEADS)
family("cohere", "CohereForCausalLM", {"cohere": {"logit_scale": 0.3, **TIED}}, held=["cohere"], implied=HEADS)
family(
    "cohere2", "Cohere2ForCausalLM",
    {"cohere2": {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.3, **TIED}},
    held=["cohere2"], implied=HEADS,
)  # fmt: skip

LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
family("deepseek_v2", "DeepseekV2ForCausalLM", {
    "deepseek-v2": {
        **LATENT, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32,
            "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707, "rope_theta": 10_000.0,
        },
    },
    "deepseek-v2-queries-of-a-vector": {**LATENT, "q_lora_rank": 20, "routed_scaling_factor": 1.5},
    "deepseek-v2-groups": {**LATENT, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
}, refused="latent pages", implied=HEADS)  # fmt: skip
family(
    "glm4_moe_lite", "Glm4MoeLiteForCausalLM",
    {"glm4-moe-lite": {**LATENT, "q_lora_rank": 20, "n_group": 2, "topk_group": 1}},
    refused="latent pages", implied="num_key_value_heads",
)  # fmt: skip
LING = {
    **{key: LATENT[key] for key in LATENT if key not in ("n_routed_experts", "n_shared_experts")},
    "head_dim": 32, "num_experts": 8, "num_shared_experts": 1, "n_group": 2, "topk_group": 1, "layer_group_size": 3,
    "num_hidden_layers": 3, "short_conv_kernel_size": 4, "kda_safe_gate": True, "kda_lower_bound": -5.0,
    "moe_shared_expert_intermediate_size": 40, "num_nextn_predict_layers": 0,
}  # fmt: skip
family(
    "bailing_hybrid", "BailingHybridForCausalLM", {
        "ling3": {**LING, "q_lora_rank": 20, "rope_theta": 10_000.0},
        "ling3-unbounded-decays": {
            **LING, "head_dim": 12, "kda_safe_gate": False, "n_group": 1, "num_shared_experts": 2
        },
    },
    refused="does not write states", implied="num_key_value_heads head_dim",
)  # fmt: skip
family(
    "ernie4_5", "Ernie4_5ForCausalLM",
    {"ernie4.5": {"head_dim": 12, **TIED}, "ernie4.5-biases": {"head_dim": 12, "use_bias": True}},
    held=["ernie4.5", "ernie4.5-biases"],
)  # fmt: skip
family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {
    "ernie4.5-moe": {
        "head_dim": 12, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 2,
        "num_hidden_layers": 3, **TIED,
    },
}, refused="shared experts")  # fmt: skip
family("exaone4", "Exaone4ForCausalLM", {
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 8, "head_dim": 12},
    "exaone4-no-window": {"sliding_window": None, "head_dim": 12, "layer_types": ["full_attention"] * 2},
}, refused="write its windows", implied="head_dim")  # fmt: skip

FALCON_STATES = {
    "mamba_d_ssm": 72, "mamba_n_heads": 6, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 10,
    "mamba_d_conv": 4, "head_dim": 12,
}  # fmt: skip
FALCON_FACTORS = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.5], "mlp_multipliers": [0.8, 0.7],
}  # fmt: skip
family("falcon_h1", "FalconH1ForCausalLM", {
    "falcon-h1": {
        "rope_theta": 1e11, "mamba_rms_norm": False, **FALCON_FACTORS, **FALCON_STATES,
        "mamba_d_ssm": 192, "mamba_d_head": 32, "mamba_d_state": 16,  # whole vectors, which native kernels take
    },
    "falcon-h1-norm-behind-gate": {
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, **TIED, **FALCON_FACTORS, **FALCON_STATES,
    },
    "falcon-h1-norm-before-gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": True, **FALCON_STATES},
}, refused="does not write states", implied=HEADS)  # fmt: skip

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 2, "hidden_activation": "gelu_pytorch_tanh", **TIED}
GEMMA3 = {**GEMMA, "num_hidden_layers": 3, "sliding_window": 8, "sliding_window_pattern": 3}
SCORED = {"query_pre_attn_scalar": 16}  # llama.cpp scales Gemma's scores by the head's size
family("gemma2", "Gemma2ForCausalLM", {
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 6.0, "final_logit_softcapping": 0.5, **GEMMA},
    "gemma2-no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, **GEMMA},
}, held={"gemma2": SCORED}, refused={"gemma2": "multiplies its scores"})  # fmt: skip
family("gemma3_text", "Gemma3ForCausalLM", {
    "gemma3": GEMMA3,
    "gemma3-scaled-global-rope": {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5000.0,
        "final_logit_softcapping": 0.5, **GEMMA3,
    },
}, held={"gemma3": SCORED, "gemma3-scaled-global-rope": SCORED}, refused={"gemma3": "multiplies its scores"},
)  # fmt: skip

GEMMA4 = {
    "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, **TIED,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "final_logit_softcapping": 30.0,
}  # fmt: skip
PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 160}
VALUES_OF_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
family("gemma4_text", "Gemma4ForCausalLM", {
    "gemma4-shared-pages-and-embeddings-of-layers": {
        **GEMMA4, **PER_LAYER, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "num_key_value_heads": 1,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
            "full_attention",
        ],
    },
    "gemma4-values-of-keys": {**GEMMA4, **PER_LAYER, **VALUES_OF_KEYS},
    "gemma4-moe": {
        **GEMMA4, **PER_LAYER, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
}, refused="layers of different sizes")  # fmt: skip
family(
    "gemma4_unified_text", "Gemma4UnifiedForCausalLM",  # of 12B, whose model of images has no tower
    {"gemma4-unified": {**GEMMA4, **VALUES_OF_KEYS, "use_bidirectional_attention": "vision"}}, refused="no GGUF files",
)  # fmt: skip
family("glm", "GlmForCausalLM", {"glm": {"head_dim": 12}}, refused="no GGUF files")
family("glm4", "Glm4ForCausalLM", {"glm4": {"head_dim": 16, "partial_rotary_factor": 0.5}}, held=["glm4"])
family(
    "gpt2", "GPT2LMHeadModel", {
        "gpt2": {},
        "gpt2-odd-options": {
            "n_inner": 72, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    },
    held=["gpt2"], refused={"gpt2-odd-options": "multiplies its scores"}, implied="n_inner",
    sizes={
        "vocab_size": 160, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
        "eos_token_id": 2,
    },
)  # fmt: skip

OSS_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
family("gpt_oss", "GptOssForCausalLM", {
    "gpt-oss": {
        "sliding_window": 8, "num_hidden_layers": 3, "rope_parameters": {**YARN, "truncate": False}, **OSS_EXPERTS,
    },
    "gpt-oss-no-window-no-biases": {
        "layer_types": ["full_attention"] * 2, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **OSS_EXPERTS,
    },
}, refused="rounds the ramp of YaRN")  # fmt: skip

GRANITE = {
    "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 4.0,
}  # fmt: skip
GRANITE_EXPERTS = {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}
GRANITE_STATES = {
    **GRANITE, "shared_intermediate_size": 56, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 12,
    "mamba_expand": 2, "mamba_d_conv": 4,
}  # fmt: skip
family("granite", "GraniteForCausalLM", {"granite": {**GRANITE, **TIED}}, held=["granite"], implied=HEADS)
family("granitemoe", "GraniteMoeForCausalLM", {"granite-moe": GRANITE_EXPERTS}, refused="no GGUF files", implied=HEADS)
family(
    "granitemoeshared", "GraniteMoeSharedForCausalLM",
    {"granite-moe-shared": {**GRANITE_EXPERTS, "shared_intermediate_size": 56}}, refused="no GGUF files", implied=HEADS,
)  # fmt: skip
family("granitemoehybrid", "GraniteMoeHybridForCausalLM", {
    "granite4": {
        "num_hidden_layers": 3, "num_local_experts": 0, "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_groups": 2, "position_embedding_type": "nope", **TIED, **GRANITE_STATES,
    },
    "granite4-experts": {
        "layer_types": ["mamba", "attention"], "num_local_experts": 6, "num_experts_per_tok": 2,
        "mamba_n_groups": 1, **GRANITE_STATES,
    },
    "granite4-dense": {
        "layer_types": ["attention"] * 2, "num_local_experts": 0, "position_embedding_type": "rope",
        **GRANITE_STATES,
    },
}, refused="does not write states", implied=f"{HEADS} intermediate_size")  # fmt: skip
family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", {
    "hunyuan": {
        "head_dim": 12, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "rope_theta": 10000.0,
    },
}, held=["hunyuan"], implied=HEADS)  # fmt: skip

LFM2 = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], **TIED}
LFM2_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1}
family("lfm2", "Lfm2ForCausalLM", {
    "lfm2": {**LFM2, "block_auto_adjust_ff_dim": False},
    "lfm2-adjusted": {**LFM2, "block_multiple_of": 16, "conv_L_cache": 7},
}, refused="does not write states", implied="head_dim")  # fmt: skip
family("lfm2_moe", "Lfm2MoeForCausalLM", {
    "lfm2-moe": {**LFM2, **LFM2_EXPERTS},
    "lfm2-moe-uncorrected": {
        "num_hidden_layers": 2, "layer_types": ["full_attention", "conv"], "use_expert_bias": False,
        "norm_topk_prob": False, "routed_scaling_factor": 2.0, **TIED, **LFM2_EXPERTS,
    },
}, refused="does not write states", implied="head_dim")  # fmt: skip
family("lfm3", "Lfm3ForCausalLM", {
    "lfm3": {
        "num_hidden_layers": 4, "head_dim": 12, "sliding_window": 8, **TIED,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5,
            },
        },
    },
}, refused="no GGUF files")  # fmt: skip
family("ministral3", "Ministral3ForCausalLM", {
    "ministral3": {
        "head_dim": 12, "sliding_window": None, "rope_parameters": {
            **YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
}, refused="scaling of queries")  # fmt: skip
family(
    "mistral", "MistralForCausalLM",
    {"mistral-window": {"sliding_window": 8, "head_dim": 12}, "mistral-no-window": {"sliding_window": None}},
    held=["mistral-window", "mistral-no-window"], implied="head_dim",
)  # fmt: skip

MOE = {"num_experts_per_tok": 2, "head_dim": 12}
family("mixtral", "MixtralForCausalLM", {
    "mixtral": {"num_local_experts": 4, **MOE},
    "mixtral-window": {"num_local_experts": 3, "sliding_window": 8, **MOE},
}, held=["mixtral", "mixtral-window"], implied="head_dim")  # fmt: skip

BERT = {
    "global_attn_every_n_layers": 3, "local_attention": 12, "num_hidden_layers": 4, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip
family("modernbert", "ModernBertModel", {
    "modernbert": BERT,
    "modernbert-biases": {
        **BERT, "attention_bias": True, "mlp_bias": True, "global_rope_theta": 5000.0, "local_rope_theta": 700.0,
    },
}, embeds=True, without="num_key_value_heads")  # fmt: skip

NEMOTRON = {
    "mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 10, "conv_kernel": 4, "head_dim": 12,
}  # fmt: skip
NEMOTRON_EXPERTS = {
    **NEMOTRON, "num_hidden_layers": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.7, "moe_shared_expert_intermediate_size": 56,
}  # fmt: skip
family("nemotron_h", "NemotronHForCausalLM", {
    "nemotron-h": {"hybrid_override_pattern": "M-*-M", "num_hidden_layers": 5, **NEMOTRON},
    "nemotron-h-experts-in-groups": {
        "n_group": 3, "topk_group": 2, **NEMOTRON_EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    },
    "nemotron-h-experts-of-latent-vectors": {
        "moe_latent_size": 32, **NEMOTRON_EXPERTS,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    },
}, refused="does not write states", implied=f"{HEADS} num_hidden_layers intermediate_size")  # fmt: skip
family(
    "olmo2", "Olmo2ForCausalLM", {"olmo2": {}, "olmo2-tied-wide-heads": {"head_dim": 12, **TIED}},
    held=["olmo2", "olmo2-tied-wide-heads"], implied=HEADS,
)  # fmt: skip
family("olmo3", "Olmo3ForCausalLM", {
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 8},
    "olmo3-scaled-global-rope": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
        **scaled("yarn", original_max_position_embeddings=16), "rope_theta": 500000.0,
    },
}, held=["olmo3", "olmo3-scaled-global-rope"], implied=HEADS)  # fmt: skip
family(
    "olmoe", "OlmoeForCausalLM", {"olmoe": {"num_experts": 6, "num_experts_per_tok": 2}}, refused="another sum",
    implied=HEADS,
)  # fmt: skip


def longrope(original: int) -> dict[str, Any]:
    short, long = ([first + step * i for i in range(4)] for first, step in ((1.0, 0.1), (2.0, 1.5)))
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


family("phi3", "Phi3ForCausalLM", {
    "phi3": {"sliding_window": 8}, "phi3-partial-rope": {"partial_rotary_factor": 0.5},
    "phi3-longrope-short": longrope(128), "phi3-longrope-past-length": longrope(16),
    "phi3-longrope-crossing": longrope(48),
}, held=["phi3", "phi3-partial-rope", "phi3-longrope-crossing"], implied=HEADS)  # fmt: skip
family(
    "qwen2", "Qwen2ForCausalLM",
    {"qwen2": TIED, "qwen2-window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}},
    held=["qwen2"], refused={"qwen2-window": "sliding window"}, implied="head_dim",
)  # fmt: skip
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
family(
    "qwen2_moe", "Qwen2MoeForCausalLM", {
        "qwen2-moe": {**QWEN_EXPERTS, "shared_expert_intermediate_size": 56},
        "qwen2-moe-window": {  # in every other layer before that one; Qwen2's are in those from it on
            "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 56, **QWEN_EXPERTS,
        },
    },
    refused="shared experts", implied="head_dim",
)  # fmt: skip
family(
    "qwen3", "Qwen3ForCausalLM",
    {"qwen3": {"head_dim": 12, **TIED}, "qwen3-biases": {"head_dim": 12, "attention_bias": True}},
    held=["qwen3", "qwen3-biases"],
)  # fmt: skip
family("qwen3_moe", "Qwen3MoeForCausalLM", {
    "qwen3-moe": {"norm_topk_prob": True, **QWEN_EXPERTS, **MOE},
    "qwen3-moe-dense-layer": {"mlp_only_layers": [0], **QWEN_EXPERTS, **MOE},
}, held=["qwen3-moe"], refused={"qwen3-moe-dense-layer": "layers without experts"}, implied="head_dim")  # fmt: skip

QWEN_STATES = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
}  # fmt: skip
family("qwen3_5_text", "Qwen3_5ForCausalLM", {
    "qwen3.5": {  # whole vectors, which native kernels take
        "num_hidden_layers": 4, **QWEN_STATES, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        "hidden_size": 64,
    },
    "qwen3.5-tied-biases": {
        "layer_types": ["full_attention", "linear_attention"], "attention_bias": True, **TIED, **QWEN_STATES,
    },
}, refused="does not write states")  # fmt: skip
family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {
    "qwen3.5-moe": {
        "num_hidden_layers": 4, **QWEN_EXPERTS, "shared_expert_intermediate_size": 56, **QWEN_STATES,
    },
}, refused="does not write states", without="intermediate_size")  # fmt: skip
family(
    "seed_oss", "SeedOssForCausalLM", {"seed-oss": {"head_dim": 12}}, held=["seed-oss"], implied="num_key_value_heads"
)
family("smollm3", "SmolLM3ForCausalLM", {
    "smollm3": {"num_hidden_layers": 4, **TIED},
    "smollm3-window": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8},
    "smollm3-window-in-layer-types": {
        "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False, "sliding_window": 8,
    },
}, held=["smollm3"], refused={"smollm3-window": "sliding window"}, implied="head_dim")  # fmt: skip
family(
    "starcoder2", "Starcoder2ForCausalLM",
    {"starcoder2": TIED, "starcoder2-window-no-biases": {"sliding_window": 8, "use_bias": False}},
    held={"starcoder2": {}, "starcoder2-window-no-biases": {"sliding_window": None}},
    refused={"starcoder2-window-no-biases": "no sliding windows"}, implied="head_dim",
)  # fmt: skip
