"""Small heads of EAGLE-3: their configs and weights in each form, and what they draft by the formulas alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from rekindle._src.models.base import LoadedModel, merge
from rekindle._src.models.hooks import STREAM_SITES, keeping
from rekindle._src.models.loading.gguf.blocks import BY_NAME, F32
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf
from rekindle._src.models.plain import PlainAttention

I64 = BY_NAME["I64"]
Arrays = Mapping[str, NDArray[Any]]
FORMS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_OWN = (  # the keys of a speculator that are no keys of its layer
    "architectures", "draft_vocab_size", "norm_before_residual", "norm_before_fc", "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip


def raw_of(target: Mapping[str, Any], form: str = FORMS[0], **changes: Any) -> dict[str, Any]:
    """The config of a head for a model with this config."""
    keys = {
        "architectures": [form], "model_type": "llama", "hidden_size": target["hidden_size"], "intermediate_size": 40,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"], "draft_vocab_size": 60, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": target["max_position_embeddings"], "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": [0, 1, target["num_hidden_layers"]],
    }  # fmt: skip
    keys |= changes
    if form != "Eagle3Speculator":
        return keys
    layer = {key: value for key, value in keys.items() if key not in _OWN}
    return {key: value for key, value in keys.items() if key in _OWN} | {
        "speculators_model_type": "eagle3", "transformer_layer_config": layer,
    }  # fmt: skip


def flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config in one form."""
    return {**raw.get("transformer_layer_config", {}), **raw}


def tensors(raw: Mapping[str, Any], seed: int = 3, *, embedding: bool = False) -> dict[str, NDArray[Any]]:
    """Random weights of a head under the names of its form."""
    keys, rng = flat(raw), np.random.default_rng(seed)
    E, inner, size = keys["hidden_size"], keys["intermediate_size"], keys["head_dim"]
    heads, kv_heads, few = keys["num_attention_heads"] * size, keys["num_key_value_heads"] * size, 2 * E
    reads = 3 * keys.get("target_hidden_size", E)
    layer = "layers.0." if keys["architectures"] == ["Eagle3Speculator"] else "midlayer."
    shapes = {
        "fc.weight": (E, reads), "norm.weight": (E,), "lm_head.weight": (keys["draft_vocab_size"], E),
        f"{layer}input_layernorm.weight": (E,), f"{layer}hidden_norm.weight": (E,),
        f"{layer}post_attention_layernorm.weight": (E,), f"{layer}self_attn.q_proj.weight": (heads, few),
        f"{layer}self_attn.k_proj.weight": (kv_heads, few), f"{layer}self_attn.v_proj.weight": (kv_heads, few),
        f"{layer}self_attn.o_proj.weight": (E, heads), f"{layer}mlp.gate_proj.weight": (inner, E),
        f"{layer}mlp.up_proj.weight": (inner, E), f"{layer}mlp.down_proj.weight": (E, inner),
    }  # fmt: skip
    shapes |= {"input_norm.weight": (reads,)} if keys.get("norm_before_fc") else {}
    shapes |= {"embed_tokens.weight": (keys["vocab_size"], E)} if embedding else {}
    state: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        state[name] = (1 + 0.2 * values if "norm" in name else 2.0 * shape[-1] ** -0.5 * values).astype(np.float32)
    if keys["draft_vocab_size"] < keys["vocab_size"]:
        others = 32 + rng.permutation(keys["vocab_size"] - 32)[: keys["draft_vocab_size"] - 32]
        ids = np.sort([*range(32), *others])
        state["d2t"] = (ids - np.arange(len(ids))).astype(np.int64)
        state["t2d"] = np.isin(np.arange(keys["vocab_size"]), ids)
    return state


def write(folder: Path, raw: Mapping[str, Any], state: Arrays | None = None) -> str:
    """A checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "float32"}))
    state = tensors(raw) if state is None else state
    save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, folder / "model.safetensors")
    return str(folder)


def write_file(file: Path, raw: Mapping[str, Any], state: Arrays) -> str:
    """A head as llama.cpp's converter writes it: rotated pairs side by side, and the ids of tokens."""
    keys = flat(raw)
    names = {
        "fc.weight": "fc.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
        "embed_tokens.weight": "token_embd.weight", "input_norm.weight": "enc.output_norm.weight", "d2t": "d2t",
    }  # fmt: skip
    inner = {
        "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    names |= {f"midlayer.{name}.weight": f"blk.0.{other}.weight" for name, other in inner.items()}
    stored: dict[str, NDArray[Any]] = {}
    for name, value in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = value.reshape(-1, 2, keys["head_dim"] // 2, value.shape[1])
            stored[names[name]] = halves.swapaxes(1, 2).reshape(value.shape)
        elif name != "t2d":
            stored[names[name]] = value + np.arange(len(value)) if name == "d2t" else value
    metadata = file_metadata(
        "eagle3", keys, vocab_size=keys["vocab_size"], target_layers=keys["eagle_aux_hidden_state_layer_ids"],
        target_hidden_size=keys["hidden_size"], norm_before_residual=keys.get("norm_before_residual", False),
        norm_before_fc=keys.get("norm_before_fc", False),
    )  # fmt: skip
    kinds = {name: I64 if name == "d2t" else F32 for name in stored}
    tensors = [OutgoingTensor(name, kinds[name], value.shape) for name, value in stored.items()]
    pieces = (value.astype(np.int64 if name == "d2t" else np.float32) for name, value in stored.items())
    write_gguf(file, metadata, tensors, pieces)
    return str(file)


def file_metadata(architecture: str, keys: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """The metadata of a head's file; `own` are those of this architecture alone."""
    values: dict[str, Any] = {
        "block_count": keys["num_hidden_layers"], "embedding_length": keys["hidden_size"],
        "attention.head_count": keys["num_attention_heads"], "attention.head_count_kv": keys["num_key_value_heads"],
        "attention.key_length": keys["head_dim"], "attention.value_length": keys["head_dim"],
        "context_length": keys["max_position_embeddings"], "feed_forward_length": keys["intermediate_size"],
        "attention.layer_norm_rms_epsilon": keys["rms_norm_eps"], "rope.freq_base": keys["rope_theta"],
    } | own  # fmt: skip
    known = {"general.architecture": architecture, "tokenizer.ggml.model": "none"}
    return {**known, **{f"{architecture}.{key}": value for key, value in values.items()}}


def streams(model: LoadedModel, text: list[int], layers: tuple[int, ...]) -> NDArray[Any]:
    """The inputs of these layers of a model over a whole text, side by side; those of one layer more are the last
    layer's outputs."""
    module: Any = merge(model.graph, model.leaves)
    kept: dict[tuple[str, int], Any] = {}
    ids = jnp.array(text, jnp.int32)
    attend, lengths = PlainAttention(module, len(ids)), jnp.full(len(ids), len(ids))
    module(ids, jnp.arange(len(ids)), attend, lengths, [keeping(kept, STREAM_SITES)])
    before = [kept["residual_before", 0], *(kept["residual", layer] for layer in range(model.config.num_layers))]
    return np.concatenate([np.asarray(before[layer], np.float64) for layer in layers], axis=-1)


def drafts(
    raw: Mapping[str, Any], state: Arrays, embedding: NDArray[Any], read: NDArray[Any], text: list[int],
    places: list[int], count: int,
) -> dict[int, list[NDArray[Any]]]:  # fmt: skip
    """The logits of so many drafts after the tokens at some places of a text, by the formulas of EAGLE-3 in NumPy.

    `read` are the inputs of the model's layers. Each further draft is after the likeliest token of those before.
    """
    keys = flat(raw)
    size, heads, kv_heads = keys["head_dim"], keys["num_attention_heads"], keys["num_key_value_heads"]
    weights = {name.replace("layers.0.", "midlayer."): np.asarray(value, np.float64) for name, value in state.items()}
    table = weights.get("embed_tokens.weight", embedding.astype(np.float64))
    ids = np.arange(keys["draft_vocab_size"]) + state.get("d2t", 0)

    def norm(x: NDArray[Any], name: str) -> NDArray[Any]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + keys["rms_norm_eps"]) * weights[f"{name}.weight"]

    def product(x: NDArray[Any], name: str) -> NDArray[Any]:
        return x @ weights[f"{name}.weight"].T

    def rotated(x: NDArray[Any], position: int) -> NDArray[Any]:
        angles = position * keys["rope_theta"] ** (-np.arange(0, size, 2) / size)
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def joined(g: NDArray[Any], token: int, position: int) -> tuple[NDArray[Any], ...]:
        normed = norm(g, "midlayer.hidden_norm")
        both = np.concatenate([norm(table[token], "midlayer.input_layernorm"), normed])
        q, k, v = (product(both, f"midlayer.self_attn.{one}_proj").reshape(-1, size) for one in "qkv")
        residual = normed if keys.get("norm_before_residual") else g
        return residual, rotated(q, position), rotated(k, position), v

    read = norm(read, "input_norm") if keys.get("norm_before_fc") else read
    states = product(read, "fc")
    entries = [joined(states[place], text[place + 1], place) for place in range(len(text) - 1)]
    found: dict[int, list[NDArray[Any]]] = {}
    for place in places:
        known = [entry[2:] for entry in entries[: place - 1]]
        g, token, found[place] = states[place - 1], text[place], []
        for position in range(place - 1, place - 1 + count):
            residual, q, k, v = joined(g, token, position)
            known.append((k, v))
            of_heads = (np.stack(each, 1) for each in zip(*known, strict=True))
            all_k, all_v = (np.repeat(each, heads // kv_heads, 0) for each in of_heads)
            scores = np.einsum("hd,htd->ht", q, all_k) * size**-0.5
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            attended = np.einsum("ht,htd->hd", shares / shares.sum(-1, keepdims=True), all_v)
            x = residual + product(attended.reshape(-1), "midlayer.self_attn.o_proj")
            inner = norm(x, "midlayer.post_attention_layernorm")
            gate = product(inner, "midlayer.mlp.gate_proj")
            inner = gate / (1 + np.exp(-gate)) * product(inner, "midlayer.mlp.up_proj")
            g = x + product(inner, "midlayer.mlp.down_proj")
            own = product(norm(g, "norm"), "lm_head")
            logits = np.full(keys["vocab_size"], own.min() - 1.0)
            logits[ids] = own
            found[place].append(logits)
            token = int(logits.argmax())
    return found
