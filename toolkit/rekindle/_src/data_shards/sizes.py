"""The number of data shards in an opening: the options that they share evenly, and the packing of their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rekindle._src.core.config import EngineConfig, ResolvedConfig
from rekindle._src.programs.packing import StepPacking


def config_of_one(config: ResolvedConfig, shards: int) -> ResolvedConfig:
    """Return a resolved config for one data shard: its share of the requests and of a step's tokens."""
    if shards == 1:
        return config
    requests, tokens = config.max_requests // shards, config.max_tokens_per_step // shards
    return dataclasses.replace(config, max_requests=requests, max_tokens_per_step=tokens)


def evenly(config: EngineConfig, shards: int) -> EngineConfig:
    """Round requests and tokens up, so that every data shard has as many."""
    if shards == 1:
        return config
    requests, tokens = (-(-size // shards) * shards for size in (config.max_requests, config.max_tokens_per_step))
    return dataclasses.replace(config, max_requests=requests, max_tokens_per_step=tokens)


def packing_for(shards: int) -> Callable[[ResolvedConfig], StepPacking]:
    """Return the function that makes the packing of a session from the config of one data shard."""
    if shards == 1:
        return StepPacking.of
    from rekindle._src.data_shards.packing import DataShards  # most sessions have one

    return lambda config: DataShards(config.max_requests, config.device_pages, shards)


def in_each(shards: int) -> str:
    """Return the end of a sentence about sizes: " in each of 4 data shards", or nothing."""
    return f" in each of {shards} data shards" if shards > 1 else ""
