"""Small heads of DFlash: their configs and weights in each form, and what they draft by the formulas alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.eagle import file_metadata
from rekindle._src.models.loading.gguf.blocks import F32
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf

Arrays = Mapping[str, NDArray[Any]]
FORMS = ("nested", "flat", "speculator")  # of the keys of DFlash: apart, among the others, with the layer's apart
_OWN = ("mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size")


def raw_of(target: Mapping[str, Any], form: str = FORMS[0], **changes: Any) -> dict[str, Any]:
    """The config of a head of two layers for a model with this config."""
    keys = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": target["hidden_size"],
        "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 2, "vocab_size": target["vocab_size"], "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": target["max_position_embeddings"], "hidden_act": "silu", "block_size": 5,
        "mask_token_id": target["vocab_size"] - 1, "target_layer_ids": [0, target["num_hidden_layers"] - 1],
    }  # fmt: skip
    keys |= changes
    if form == "flat":
        return keys
    own = {key: keys.pop(key) for key in _OWN if key in keys}
    if form == "nested":
        return keys | {"dflash_config": own}
    own["aux_hidden_state_layer_ids"] = [layer + 1 for layer in own.pop("target_layer_ids")]
    architectures = keys.pop("architectures")
    return own | {"architectures": architectures, "speculators_model_type": "dflash", "transformer_layer_config": keys}


def flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config in one form."""
    keys = {**raw.get("transformer_layer_config", {}), **raw, **raw.get("dflash_config", {})}
    if "aux_hidden_state_layer_ids" in keys:
        keys["target_layer_ids"] = [layer - 1 for layer in keys["aux_hidden_state_layer_ids"]]
    return keys


def tensors(raw: Mapping[str, Any], seed: int = 3) -> dict[str, NDArray[Any]]:
    """Random weights of a head."""
    keys, rng = flat(raw), np.random.default_rng(seed)
    E, inner, size = keys["hidden_size"], keys["intermediate_size"], keys["head_dim"]
    heads, kv_heads = keys["num_attention_heads"] * size, keys["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (E, len(keys["target_layer_ids"]) * E), "hidden_norm.weight": (E,), "norm.weight": (E,),
    }  # fmt: skip
    for layer in range(keys["num_hidden_layers"]):
        start = f"layers.{layer}"
        shapes |= {
            f"{start}.input_layernorm.weight": (E,), f"{start}.post_attention_layernorm.weight": (E,),
            f"{start}.self_attn.q_norm.weight": (size,), f"{start}.self_attn.k_norm.weight": (size,),
            f"{start}.self_attn.q_proj.weight": (heads, E), f"{start}.self_attn.k_proj.weight": (kv_heads, E),
            f"{start}.self_attn.v_proj.weight": (kv_heads, E), f"{start}.self_attn.o_proj.weight": (E, heads),
            f"{start}.mlp.gate_proj.weight": (inner, E), f"{start}.mlp.up_proj.weight": (inner, E),
            f"{start}.mlp.down_proj.weight": (E, inner),
        }  # fmt: skip
    state: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        state[name] = (1 + 0.2 * values if "norm" in name else 2.0 * shape[-1] ** -0.5 * values).astype(np.float32)
    return state


def windows(keys: Mapping[str, Any]) -> tuple[list[bool], int]:
    """Which layers have a window, and its tokens."""
    slides = [kind == "sliding_attention" for kind in keys.get("layer_types", [])]
    slides = slides or [bool(keys.get("use_swa"))] * keys["num_hidden_layers"]
    return slides, int(keys.get("swa_window_size") or keys.get("sliding_window") or 0)


def write_file(file: Path, raw: Mapping[str, Any], state: Arrays, more: Arrays | None = None, **values: Any) -> str:
    """A head as llama.cpp's converter writes it: with the inputs of layers that it reads, and a tokenizer's tokens.

    `more` are tensors of the file that no such head has, `values` other metadata.
    """
    keys = flat(raw)
    names = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
    inner = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for layer in range(keys["num_hidden_layers"]):
        names |= {f"layers.{layer}.{name}": f"blk.{layer}.{other}" for name, other in inner.items()}
    own: dict[str, Any] = {
        "block_size": keys["block_size"], "target_layers": [layer + 1 for layer in keys["target_layer_ids"]],
    }  # fmt: skip
    slides, window = windows(keys)
    if any(slides):
        own |= {"attention.sliding_window": window, "attention.sliding_window_pattern": slides}
    own |= {} if keys.get("causal") is None else {"attention.causal": keys["causal"]}
    metadata = file_metadata("dflash", keys, **own | values) | {
        "tokenizer.ggml.mask_token_id": keys["mask_token_id"],
        "tokenizer.ggml.tokens": [f"<{token}>" for token in range(keys["vocab_size"])],
    }
    stored = {f"{names[name.removesuffix('.weight')]}.weight": value for name, value in state.items()}
    stored |= {f"{name}.weight": value for name, value in (more or {}).items()}
    tensors = [OutgoingTensor(name, F32, value.shape) for name, value in stored.items()]
    write_gguf(file, metadata, tensors, iter(stored.values()))
    return str(file)


def hidden(
    raw: Mapping[str, Any], state: Arrays, read: NDArray[Any], embedded: NDArray[Any], *, inclusive: bool = True
) -> NDArray[Any]:
    """The hidden states [B, E] of a block of embeddings [B, E] after a text of which the head reads [T, F].

    A layer with a window that reaches both ways sees one token more on each side if it is `inclusive`.
    """
    keys = flat(raw)
    size, heads, kv_heads = keys["head_dim"], keys["num_attention_heads"], keys["num_key_value_heads"]
    weights = {name: np.asarray(value, np.float64) for name, value in state.items()}
    start, block = len(read), len(embedded)

    def norm(x: NDArray[Any], name: str) -> NDArray[Any]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + keys["rms_norm_eps"]) * weights[f"{name}.weight"]

    def product(x: NDArray[Any], name: str) -> NDArray[Any]:
        return x @ weights[f"{name}.weight"].T

    def rotated(x: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
        angles = positions[:, None, None] * keys["rope_theta"] ** (-np.arange(0, size, 2) / size)
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    context = norm(product(np.asarray(read, np.float64), "fc"), "hidden_norm")
    every, own = np.arange(start + block), np.arange(start, start + block)
    slides, window = windows(keys)
    x = np.asarray(embedded, np.float64)
    for layer, slide in enumerate(slides):
        name = f"layers.{layer}.self_attn"
        normed = norm(x, f"layers.{layer}.input_layernorm")
        both = np.concatenate([context, normed])
        q = rotated(norm(product(normed, f"{name}.q_proj").reshape(block, -1, size), f"{name}.q_norm"), own)
        k = rotated(norm(product(both, f"{name}.k_proj").reshape(len(both), -1, size), f"{name}.k_norm"), every)
        v = product(both, f"{name}.v_proj").reshape(len(both), -1, size)
        k, v = (np.repeat(one, heads // kv_heads, axis=1) for one in (k, v))
        scores = np.einsum("bhd,thd->hbt", q, k) * size**-0.5
        distance = own[:, None] - every
        causal = slide if keys.get("causal") is None else keys["causal"]
        seen = distance >= 0 if causal else distance == distance
        if slide:
            seen &= abs(distance) < window + (inclusive and not causal)
        scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hbt,thd->bhd", shares / shares.sum(-1, keepdims=True), v)
        x = x + product(attended.reshape(block, -1), f"{name}.o_proj")
        inner = norm(x, f"layers.{layer}.post_attention_layernorm")
        gate = product(inner, f"layers.{layer}.mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * product(inner, f"layers.{layer}.mlp.up_proj")
        x = x + product(inner, f"layers.{layer}.mlp.down_proj")
    return norm(x, "norm")
