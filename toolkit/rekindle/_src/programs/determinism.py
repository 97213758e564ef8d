"""Deterministic steps: a token's numbers are the same to the last bit in any batch. Not all models can have them."""

from __future__ import annotations

import dataclasses

import jax

from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import Graph
from rekindle._src.models.config import ModelConfig
from rekindle.errors import ConfigError
from rekindle_kernels import unavailable_reason

HEAD_DIM, WIDTH = 16, 32  # native attention and native norms take multiples of these sizes
KEYS, VALUES = 16, 32  # and native kernels of states those of these
LAYER_NORMS = ("cohere", "cohere2", "gpt2", "starcoder2")  # XLA's have other bits in another number of rows


def deterministic(graph: Graph, config: EngineConfig) -> Graph:
    """Return the graph whose operations run in deterministic kernels. Raise ConfigError where there are none."""
    reason = reason_against(graph.config, config)
    if reason is not None:
        raise ConfigError("deterministic", True, f"can't be kept: {reason}", "Leave it out")
    return dataclasses.replace(graph, precision=dataclasses.replace(graph.precision, deterministic=True))


def reason_against(model: ModelConfig, config: EngineConfig) -> str | None:
    """Return why this model has no deterministic steps here; None if it has."""
    if jax.default_backend() != "cpu":
        return f"it is for CPUs, and this session runs on {jax.default_backend()}"
    if config.mesh is not None:
        return "devices that share a model add up what each of them has"
    missing = unavailable_reason("cpu")
    if missing is not None:
        return f"it needs the native kernels, and {missing}"
    if config.kernels not in (None, "native"):
        return f"kernels={config.kernels!r} add in an order that depends on the batch"
    if any(model.moe):
        return "experts are multiplied in an order that depends on the batch"
    if model.model_type in LAYER_NORMS:
        return "XLA computes its layer norms, for which nothing is promised"
    if any(pages.latent for pages in model.kinds_of_pages):
        return "XLA attends to latent pages, for which nothing is promised"
    if model.is_bidirectional:
        return "XLA attends to tokens behind a query, for which nothing is promised"
    for state in (spec for spec in model.states if spec is not None):
        if state.channels % KEYS or state.key_size % KEYS or state.value_size % VALUES:
            sizes = f"states of {state.key_size} x {state.value_size} beside {state.channels} channels"
            return f"{sizes} are not whole vectors, and XLA takes a prompt through them in another order than a token"
    uneven = [pages.key_size for pages in model.kinds_of_pages if pages.key_size % HEAD_DIM]
    if uneven:
        return f"the head size {uneven[0]} is not a multiple of {HEAD_DIM}"
    if model.hidden_size % WIDTH:
        return f"the hidden size {model.hidden_size} is not a multiple of {WIDTH}"
    return None
