"""Small assistants of Gemma 4 models: their configs and weights, and what they draft of whole texts without pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from helpers import checkpoints
from rekindle._src.models.base import merge
from rekindle._src.models.families.gemma4_text import ROPES
from rekindle._src.models.loading.gguf.blocks import F32
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf
from rekindle._src.models.loading.gguf.source import llama_cpp_name
from rekindle._src.models.loading.stored import text_config
from rekindle._src.models.plain import PlainAttention
from rekindle._src.models.registry import config_from_hf, manifest

CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 20, "centroid_intermediate_top_k": 5}
_OF_TARGET = (
    "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v",
    "sliding_window", "vocab_size", "rope_parameters", "max_position_embeddings",
)  # fmt: skip


def raw_of(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config of an assistant of two layers for a model with this config."""
    own = {key: target[key] for key in _OF_TARGET if key in target} | {
        "model_type": target["model_type"], "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_kv_shared_layers": 2, "num_attention_heads": 4, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True, "enable_moe_block": False, "use_double_wide_mlp": False,
    }  # fmt: skip
    return {
        "model_type": target["model_type"].replace("_text", "_assistant"),
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": own,
        **changes,
    }


def tensors(raw: dict[str, Any], seed: int = 3) -> dict[str, NDArray[Any]]:
    """Random weights of an assistant under the names of its checkpoint."""
    config = text_config(raw)
    state = checkpoints.tensors(config, seed)
    if "masked_embedding.token_ordering" in state:
        order = np.random.default_rng(seed).permutation(config["vocab_size"])
        state["masked_embedding.token_ordering"] = order.astype(np.int64)
    return state


def write(folder: Path, raw: dict[str, Any], state: dict[str, NDArray[Any]] | None = None) -> str:
    """A checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, "dtype": "float32"}))
    state = tensors(raw) if state is None else state
    save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, folder / "model.safetensors")
    return str(folder)


def write_file(file: Path, raw: dict[str, Any], state: dict[str, NDArray[Any]]) -> str:
    """An assistant as llama.cpp's converter writes it: without clusters, and all of its blocks draft."""
    own = text_config(raw)
    config = config_from_hf(own | {"model_type": "gemma4_assistant", "use_ordered_embeddings": False})
    names = [name for source in manifest(config).sources.values() for name in source.names]
    stored = {llama_cpp_name(name, config): state[name] for name in names}
    size, full = own["head_dim"], own.get("global_head_dim", 512)
    ropes = own.get("rope_parameters", ROPES)
    rotated = int(full * ropes["full_attention"]["partial_rotary_factor"] / 2)
    stored["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (full // 2 - rotated))
    slides = [kind == "sliding_attention" for kind in own["layer_types"]]
    narrow = own["num_key_value_heads"]
    wide = own.get("num_global_key_value_heads") or narrow
    values: dict[str, Any] = {
        "block_count": config.num_layers, "nextn_predict_layers": config.num_layers,
        "embedding_length": config.hidden_size, "embedding_length_out": raw["backbone_hidden_size"],
        "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": [narrow if one else wide for one in slides],
        "attention.key_length": full, "attention.value_length": full, "attention.key_length_swa": size,
        "attention.value_length_swa": size, "attention.sliding_window": own["sliding_window"],
        "attention.sliding_window_pattern": slides, "context_length": own["max_position_embeddings"],
        "feed_forward_length": own["intermediate_size"], "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }  # fmt: skip
    name = "gemma4-assistant"
    metadata = {"general.architecture": name, **{f"{name}.{key}": value for key, value in values.items()}}
    tensors = [OutgoingTensor(name, F32, value.shape) for name, value in stored.items()]
    write_gguf(file, metadata, tensors, iter(value.astype(np.float32) for value in stored.values()))
    return str(file)


def drafts(model: Any, assistant: Any, text: list[int], places: list[int]) -> dict[int, list[NDArray[Any]]]:
    """The logits of drafts after the tokens at some places of a text, of whole texts without pages.

    A list begins with the logits of the first draft. Each further one is after the likeliest token of those before.
    """
    module, drafter = merge(model.graph, model.leaves), merge(assistant.graph, assistant.leaves)
    ids = jnp.array(text, jnp.int32)
    attend = _Keeping(module, len(ids))
    hidden = module(ids, jnp.arange(len(ids)), attend, jnp.full(len(ids), len(ids)))
    return {place: _drafts(module, drafter, attend.kept, hidden[place - 1], text[place], place) for place in places}


class _Keeping(PlainAttention):
    """Keeps the keys and values of all layers that make some."""

    def __init__(self, module: Any, length: int) -> None:
        super().__init__(module, length)
        self.kept: dict[int, tuple[Any, Any]] = {}

    def __call__(self, layer: int, q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        if k is not None:
            self.kept[layer] = k, v
        return super().__call__(layer, q, k, v, *sinks)


def _drafts(
    module: Any, drafter: Any, kept: dict[int, tuple[Any, Any]], hidden: Any, token: int, place: int
) -> list[NDArray[Any]]:
    config = module.config

    def attend(layer: int, q: Any, k: None, v: None) -> Any:
        window = drafter.config.attention[layer].sliding_window
        alike = [one for one in kept if (config.attention[one].sliding_window is None) == (window is None)]
        first = 0 if window is None else max(0, place - window + 1)
        keys, values = (np.asarray(each)[first:place] for each in kept[max(alike)])  # numpy compiles nothing
        groups = q.shape[1] // keys.shape[1]
        scores = np.einsum("nhd,thd->nht", np.asarray(q), np.repeat(keys, groups, 1))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return jnp.asarray(np.einsum("nht,thd->nhd", weights, np.repeat(values, groups, 1)))

    found, state = list[NDArray[Any]](), hidden[None]
    for _ in range(3):
        embedded = module.embedded(jnp.array([token]))
        own, state = drafter(embedded, state, jnp.array([place]), attend)
        found.append(np.asarray(drafter.logits(own)[0]))
        token = int(found[-1].argmax())
    return found
