"""Layers that mix tokens in two ways at once, and layers that are a mixer or an MLP alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from rekindle._src.models.config import Cache, ModelConfig, Multipliers
from rekindle._src.models.nn.decoders import Block
from rekindle._src.models.nn.layers import Attend, Attention, MultipliedMlp, PlainMlp, RopeTables
from rekindle._src.models.nn.linear import RMSNorm
from rekindle._src.models.nn.moe import Experts
from rekindle._src.models.nn.recurrent import StateSpace
from rekindle._src.models.precision import Precision


class TwofoldMixer(nnx.Module):
    """Attention and Mamba-2, which read the same input; their results are multiplied by factors and added."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        self.heads = Attention(config, layer, precision)
        self.recurrence = StateSpace(config, layer, precision)
        self.multipliers = config.multipliers or Multipliers()

    def __call__(
        self,
        x: jax.Array,
        tables: RopeTables,
        attend: Attend,
        residual: jax.Array | None = None,
        norm: RMSNorm | None = None,
    ) -> jax.Array:
        """Compute the results for norm(x), plus `residual`."""
        attended = self.heads(x, tables, attend, norm=norm) * self.multipliers.attention
        y: jax.Array = self.recurrence(x, tables, attend, norm=norm) * self.multipliers.state + attended
        return y if residual is None else residual + y


class TwofoldBlock(Block):
    """A block with such a mixer."""

    def make_attention(self, config: ModelConfig, layer: int, precision: Precision) -> Any:
        return TwofoldMixer(config, layer, precision)

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        return MultipliedMlp(config, precision)


class SingleBlock(nnx.Module):
    """One layer: a norm, and Mamba-2 or attention where the config has a cache, an MLP or experts where it has none."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        cache, spec = config.caches[layer], config.moe[layer] if config.moe else None
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.mixes = cache != Cache()
        if cache.state is not None:
            self.attention: nnx.Module = StateSpace(config, layer, precision)
        elif self.mixes:
            self.attention = Attention(config, layer, precision)
        elif spec is not None:
            self.mlp: nnx.Module = Experts(config, spec, precision)
        else:
            self.mlp = PlainMlp(dataclasses.replace(config, intermediate_size=config.mlp_size(layer)), precision)

    def __call__(self, x: jax.Array, tables: RopeTables, attend: Attend) -> jax.Array:
        y: jax.Array
        if self.mixes:
            with jax.named_scope("attention"):
                y = self.attention(x, tables, attend, x, self.norm)
        else:
            with jax.named_scope("mlp"):
                y = self.mlp(x, x, self.norm)
        return y
