"""Random adapters as PEFT folders, and a model's output with one of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from helpers.plain_loop import plain_loop
from rekindle._src.models.adapters.adapted import merged
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.plain import AttendOwn
from workshop import reference

CONFIG: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": ""}


def modules(
    config: ModelConfig, targets: Sequence[str] | None = None, layers: Sequence[int] | None = None
) -> list[str]:
    """The modules of a model that a list of targets means; all but experts without one."""
    names = [
        (name, int(site.path.split(".")[1]))
        for site in sites_of(config).sites
        for name in site.modules
        if not site.path.endswith(("router", "shared_gate")) and (targets is not None or not site.experts)
    ]
    return [
        name
        for name, layer in names
        if (targets is None or name.rpartition(".")[2] in targets) and (layers is None or layer in layers)
    ]


def tensors(
    config: ModelConfig, names: Sequence[str], seed: int, ranks: Mapping[str, int], *, rank: int = 4
) -> dict[str, NDArray[np.float32]]:
    """Random matrices under PEFT's names. They are as large as it takes to change a text."""
    rng, by_module = np.random.default_rng(seed), sites_of(config).by_module()
    state: dict[str, NDArray[np.float32]] = {}
    for name in names:
        site, index = by_module[name]
        own = next((value for key, value in ranks.items() if name.endswith(key)), rank)
        state |= _pair(rng, name, site.inputs, site.rows_of(index), own)
    return state


def _pair(
    rng: np.random.Generator, name: str, inputs: int, outputs: int, rank: int, experts: int = 1
) -> dict[str, NDArray[np.float32]]:
    state = {}
    for letter, shape in {"A": (rank * experts, inputs), "B": (outputs, rank * experts)}.items():
        values = rng.standard_normal(shape) * (inputs**-0.5 if letter == "A" else 0.6 * rank**-0.5)
        state[f"base_model.model.{name}.lora_{letter}.weight"] = values.astype(np.float32)
    return state


def parameters(
    config: ModelConfig, names: Sequence[str], seed: int, *, rank: int = 4, layers: Sequence[int] | None = None
) -> dict[str, NDArray[np.float32]]:
    """Random matrices of all experts as PEFT nests them: the module of the last parameter lies around the others."""
    rng, state = np.random.default_rng(seed), dict[str, NDArray[np.float32]]()
    for site in sites_of(config).sites:
        name, _, layer = "down_proj" if site.path.endswith(".down") else "gate_up_proj", *site.path.split(".")[:2]
        if site.experts and name in names and (layers is None or int(layer) in layers):
            outer = name == max(names, key=("gate_up_proj", "down_proj").index)
            module = f"model.layers.{layer}.mlp.experts" + ("" if outer else ".base_layer")
            state |= _pair(rng, module, site.inputs, site.outputs, rank, site.experts)
    return state


def write(
    folder: Path, config: ModelConfig, *, seed: int = 0, rank: int = 4, targets: Sequence[str] | None = None,
    layers: Sequence[int] | None = None, experts: Sequence[str] = (), **fields: Any,
) -> Path:  # fmt: skip
    """Write a PEFT folder with a random adapter, also of parameters of all experts; `fields` go into its config."""
    folder.mkdir(parents=True, exist_ok=True)
    names = modules(config, targets, layers)
    state = tensors(config, names, seed, fields.get("rank_pattern", {}), rank=rank)
    if experts:
        state |= parameters(config, experts, seed, rank=rank)
        fields["target_parameters"] = [f"mlp.experts.{name}" for name in experts]
    ends = sorted({name.rpartition(".")[2] for name in names})
    raw = {
        **CONFIG, "r": rank, "lora_alpha": 2 * rank, "target_modules": list(ends if targets is None else targets),
        **fields,
    }  # fmt: skip
    if layers is not None:
        raw["layers_to_transform"] = list(layers)
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def changed(model: LoadedModel, source: Any) -> LoadedModel:
    """A model with an adapter in its weights, or as it is without one; `source` may be an adapter that was read."""
    return model if source is None else merged(model, read_adapter(source, "it", model.config))


def plain(model: LoadedModel, source: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The plain loop's text of a model with an adapter in its weights, or without one."""
    return plain_loop(changed(model, source), prompt, count, context=128)


def plain_states(
    model: LoadedModel, source: Any, ids: Sequence[int], *, size: int = 64
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The final states and the logits of a text with an adapter in the weights, in one pass without pages or steps."""
    whole, padded = changed(model, source), np.zeros(size, np.int32)  # one program for all; no token sees a later one
    padded[: len(ids)] = ids
    states, logits = _dense(whole.graph, whole.leaves, padded)
    return np.asarray(states)[: len(ids)], np.asarray(logits)[: len(ids)]


@functools.partial(jax.jit, static_argnums=0)
def _dense(graph: Graph, leaves: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    module, positions = merge(graph, leaves), jnp.arange(len(tokens))

    def attention(q: Any, k: Any, v: Any, spec: Any, sinks: Any) -> Any:
        return reference.attention(q, k, v, positions, spec, sinks)

    states = module(tokens, positions, AttendOwn(graph.config, attention), lengths=jnp.full(len(tokens), len(tokens)))
    return states, module.logits(states)
