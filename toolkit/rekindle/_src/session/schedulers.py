"""The scheduler of a session with its page pool and prefix cache, or one of each for every data shard."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from rekindle._src.core.config import EngineConfig
from rekindle._src.kvcache import AnyCache, PagePool, PrefixCache, Tiers
from rekindle._src.models.base import LoadedModel
from rekindle._src.programs.buckets import prefill_rows
from rekindle._src.programs.programs import Programs
from rekindle._src.scheduling.data_scheduler import DataScheduler
from rekindle._src.scheduling.limits import Limits
from rekindle._src.scheduling.scheduler import Scheduler
from rekindle._src.scheduling.shard_scheduler import ShardScheduler
from rekindle._src.session.weights import page_identity
from rekindle_kernels import traits


class Scheduling(NamedTuple):
    """A scheduler, and the cache that it keeps pages in."""

    scheduler: Scheduler | DataScheduler
    cache: AnyCache | None


def make_scheduling(config: EngineConfig, model: LoadedModel, programs: Programs, tiers: Tiers | None) -> Scheduling:
    """Make the schedulers. `config` is the session's, resolved. Without `tiers` requests share no pages."""
    limits = _limits(config, model, programs)
    shards = programs.shards
    caches: list[PrefixCache] = []

    def pages(shard: int) -> tuple[PagePool, PrefixCache | None]:
        pool = PagePool(shards.pages, first=shard * shards.pages)
        if tiers is None:
            return pool, None
        caches.append(PrefixCache(pool, limits.page_size, page_identity(model, config).root, host_tier=tiers))
        return pool, caches[-1]

    if shards.count == 1:
        pool, cache = pages(0)
        return Scheduling(Scheduler(limits, pool, cache=cache, policy=config.policy, seed=config.seed), cache)
    arrivals, schedulers = itertools.count(), list[ShardScheduler]()
    for shard in range(shards.count):
        pool, cache = pages(shard)
        first = shard * shards.slots
        schedulers.append(
            ShardScheduler(
                limits, pool, arrivals, first_slot=first, cache=cache, policy=config.policy, seed=config.seed
            )
        )
    scheduler = DataScheduler(schedulers)
    return Scheduling(scheduler, scheduler.cache)


def _limits(config: EngineConfig, model: LoadedModel, programs: Programs) -> Limits:
    """Return the limits of each data shard. The queue's limit is for all of them together."""
    shard = programs.config
    padded = not traits(model.graph.precision.implementation).skips_padding
    limits = Limits.of(
        shard,
        max_prefill_rows=prefill_rows(shard.max_tokens_per_step, shard.max_requests),
        padded=padded,
    )
    # The admission limiter bounds the queue; a burst may be queued whole before the first of it runs.
    return dataclasses.replace(
        limits,
        max_queue=config.max_queue + config.max_requests,
        longest=model.config.max_position_embeddings,
    )
