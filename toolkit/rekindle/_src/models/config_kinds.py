"""The kind of each key of a config.json: what its value may be, whichever family reads it.

Sizes are not here: `ConfigKeys.size`, `whole`, `factor` and `only` check those that they read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_LARGEST = 1e30  # of a number; float32 ends at 3e38


class KeyKind(NamedTuple):
    """The values that a key may have, in words and as a test."""

    words: str
    accepts: Callable[[Any], bool]


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_limit(value: Any) -> bool:
    """True for a number as transformers writes it: infinity is an object."""
    own = value.get("__float__") if isinstance(value, Mapping) else value
    return _is_number(own) or own in ("Infinity", "inf", math.inf)


def _all(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple | range) and all(map(accepts, value))


def _is_per_layer(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(layer, Mapping) for layer in value.values())


_BY_KIND: Mapping[KeyKind, str] = {
    KeyKind("true or false", _is_flag): (
        "absolute_ids attention_bias attention_k_eq_v attention_out_bias block_auto_adjust_ff_dim causal "
        "enable_moe_block kda_safe_gate mamba_norm_before_gate mamba_rms_norm mlp_bias norm_before_fc "
        "norm_before_residual norm_topk_prob qkv_bias rope_interleave scale_attn_by_inverse_layer_idx "
        "scale_attn_weights tie_embedding tie_word_embeddings truncate use_bias use_bidirectional_attention "
        "use_double_wide_mlp use_expert_bias use_ordered_embeddings use_sliding_window use_swa"
    ),
    KeyKind("a whole number", _is_whole): (
        "block_ff_dim bos_token_id head_dim mamba_d_ssm max_position_embeddings max_window_layers moe_latent_size "
        "moe_layer_end_index moe_layer_start_index q_lora_rank sliding_window"
    ),
    KeyKind("a finite number", _is_number): (
        "attention_in_multiplier attention_multiplier attention_out_multiplier embedding_multiplier key_multiplier "
        "llama_4_scaling_beta lm_head_multiplier logit_scale mscale mscale_all_dim residual_multiplier "
        "routed_scaling_factor ssm_in_multiplier ssm_out_multiplier"
    ),
    KeyKind("a negative, finite number", lambda value: _is_number(value) and value < 0): "kda_lower_bound",
    KeyKind("a number of at least 0", lambda value: _is_number(value) and value >= 0): (
        "alpha beta_fast beta_slow layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon rms_norm_eps"
    ),
    KeyKind(
        "a number of at least 1", lambda value: _is_number(value) and value >= 1
    ): "original_max_position_embeddings",
    KeyKind("a positive, finite number", _is_positive): (
        "attention_factor attn_logit_softcapping factor final_logit_softcapping global_rope_theta high_freq_factor "
        "local_rope_theta logits_scaling low_freq_factor partial_rotary_factor query_pre_attn_scalar "
        "rope_local_base_freq rope_theta"
    ),
    KeyKind("a text", _is_text): (
        "activation_function dtype hybrid_override_pattern position_embedding_type rope_type topk_method torch_dtype "
        "type"
    ),
    KeyKind("a whole number or a text", lambda value: _is_whole(value) or _is_text(value)): "sliding_window_pattern",
    KeyKind("a token id, or a list of them", lambda value: _is_whole(value) or _all(_is_whole)(value)): "eos_token_id",
    KeyKind("a list of whole numbers", _all(lambda value: isinstance(value, int))): (
        "eagle_aux_hidden_state_layer_ids full_attn_idxs mlp_only_layers mrope_section no_rope_layers target_layer_ids"
    ),
    KeyKind("a list of finite numbers", _all(_is_number)): "mlp_multipliers ssm_multipliers",
    KeyKind("a list of positive, finite numbers", _all(_is_positive)): "factors long_factor short_factor",
    KeyKind("a list of two numbers", _all(_is_limit)): "time_step_limit",
    KeyKind("a list of texts", _all(_is_text)): "layer_types mlp_layer_types tensors",
    KeyKind("an object", lambda value: isinstance(value, Mapping)): "pictures rope_parameters rope_scaling",
    KeyKind("an object with one for each layer", _is_per_layer): "per_layer_config",
}
KINDS_OF_KEYS: Mapping[str, KeyKind] = {key: kind for kind, keys in _BY_KIND.items() for key in keys.split()}
_ROPES = ("rope_parameters", "rope_scaling")


class Mismatch(NamedTuple):
    """A value that is not of its key's kind."""

    key: str  # with those around it
    value: Any
    kind: KeyKind


def mismatch(key: str, value: Any) -> Mismatch | None:
    """Return the value of a key, or within it, that is of another kind; None if there is none. Null is of any kind."""
    found = _mismatch(key, key, value)
    if found is not None or value is None or key not in _ROPES:
        return found
    # The options of a rope, or an object with options for each type of layer.
    each = (
        _mismatch(f"{key}.{place[:40]}", name, option)
        for outer, options in value.items()
        for place, name, option in (
            [(f"{outer}.{inner}", inner, own) for inner, own in options.items()]
            if isinstance(options, Mapping)
            else [(outer, outer, options)]
        )
    )
    return next((found for found in each if found is not None), None)


def _mismatch(place: str, key: str, value: Any) -> Mismatch | None:
    kind = KINDS_OF_KEYS.get(key)
    return None if value is None or kind is None or kind.accepts(value) else Mismatch(place, value, kind)
