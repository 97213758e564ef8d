"""Random checkpoints of every family with heads that 2, 4 and 8 devices can share, and what they generate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import rekindle
from helpers import checkpoints
from rekindle import Completion
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.registry import config_from_hf

# Eight heads; a vocabulary and an MLP that eight devices can't share without padding.
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 84}
GPT2 = {"n_head": 8, "n_embd": 64, "vocab_size": 157}
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 2, "max_tokens_per_step": 16, "max_model_len": 48, "page_size": 8,
    "device_pages": 24, "precompile": "lazy", "disk_memory": 0, "seed": 0, "quiet": True,
}  # fmt: skip
PROMPT = [1, 5, 9, 33, 7, 8, 9, 10, 11, 12, 13]
# Heads of states, and of their keys: more than some meshes have devices, and fewer than others.
STATES = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "mamba_d_ssm": 8 * 12,
}  # fmt: skip
LEFT_OUT = {"llama-dynamic-rope-past-length", "phi3-longrope-past-length"}  # few positions, less than a context
RECURRENT = {name for name, raw in checkpoints.CASES.items() if config_from_hf(raw).is_recurrent}


def raw(name: str, kv_heads: int = 4, experts: int = 8) -> dict[str, Any]:
    """The config.json of one of the CASES with sizes for many devices."""
    found = dict(checkpoints.CASES[name])
    if found["model_type"] == "gpt2":
        return found | GPT2
    found |= SIZES | {"vocab_size": 157, "num_key_value_heads": kv_heads}
    found |= {key: size for key, size in STATES.items() if key in found}
    found |= {"mamba_d_head": 12} if "mamba_d_ssm" in found else {}
    found |= {key: 157 for key in ("vocab_size_per_layer_input",) if key in found}
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    found |= {"n_group": 4} if found.get("n_group", 1) > 1 else {}
    return found | {key: experts for key in counts if found.get(key)}


@functools.cache
def case(name: str, kv_heads: int = 4) -> LoadedModel:
    """The model of `raw`."""
    options = raw(name, kv_heads)
    return checkpoints.model(options, checkpoints.tensors(options))


def without_kernels(model: LoadedModel) -> LoadedModel:
    """The same model with XLA's products and norms; the option `kernels` is of attention alone."""
    precision = dataclasses.replace(model.graph.precision, implementation="xla")
    return dataclasses.replace(model, graph=dataclasses.replace(model.graph, precision=precision))


def generated(model: LoadedModel, mesh: Any, **options: Any) -> list[Completion]:
    """A greedy completion and a seeded one, with log-probabilities."""
    with rekindle.open_sync(model, mesh=mesh, **OPTIONS | options) as session:
        greedy = session.generate_sync(PROMPT, max_tokens=10, logprobs=3)
        drawn = session.generate_sync(PROMPT[:4], max_tokens=10, logprobs=3, temperature=0.8, seed=7, top_k=20)
        session.check_integrity()
    return [greedy, drawn]


def difference(expected: Sequence[Completion], found: Sequence[Completion]) -> float:
    """The largest difference of two log-probabilities; infinite where tokens differ."""
    if [one.token_ids for one in expected] != [one.token_ids for one in found]:
        return float("inf")
    pairs = [
        (a.logprob, b.logprob)
        for one, other in zip(expected, found, strict=True)
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True)
    ]
    return max(abs(a - b) for a, b in pairs)
