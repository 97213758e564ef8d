"""The cache of a session that is opened: pools and trees over its pages, and the tiers below the device."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rekindle._src.core import shared_cache
from rekindle._src.core.activity import ProgramWait, in_notebook
from rekindle._src.core.config import EngineConfig, spare_places
from rekindle._src.execution.runner import Runner
from rekindle._src.kvcache import AnyCache, CostModel, PagePool, PrefixCache, Tiers
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.texts import known_texts
from rekindle._src.kvcache.tiers.restoring import promote, restore, restore_side
from rekindle._src.kvcache.tiers.side_tiers import open_sides, stores_of
from rekindle._src.opening.blueprint import Blueprint
from rekindle._src.opening.programs import SessionPrograms
from rekindle._src.processes.others import OtherProcesses
from rekindle._src.programs.buckets import prefill_rows
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.repeated import MOST_STEPS
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.scheduler import Scheduler
from rekindle._src.scheduling.sequence import Limits
from rekindle_kernels import traits

if TYPE_CHECKING:
    from rekindle._src.data_shards.scheduler import DataScheduler

LOOK_SECONDS = 0.1  # that an opening waits, at most, for the indices of pages of earlier sessions


def check_snapshot(config: EngineConfig) -> None:
    """Raise StoreError for a missing snapshot before anything is loaded, unless a shared cache may have it."""
    shared = config.shared_cache or os.environ.get(shared_cache.VARIABLE)
    name = None if config.restore == "auto" or shared else config.restores
    if name is not None and config.prefix_cache and config.disk_memory:
        snapshot.find(config.cache_folder, snapshot.check_name(name))


class SessionCache:
    """The tiers of pages, and the side caches; and, once `schedule` was called, the trees of the device."""

    def __init__(self, plan: Blueprint, tiers: Tiers | None) -> None:
        self.tiers = tiers  # None without a prefix cache
        self.sides = open_sides(plan.programs.sides, tiers)
        self.stores = stores_of(self.sides)
        self.drafters: tuple[Drafter, ...] = ()
        self._plan = plan
        self._tree: AnyCache | None = None
        self._looking: threading.Thread | None = None  # for pages of earlier sessions

    @classmethod
    def open(cls, plan: Blueprint, fingerprint: str, others: OtherProcesses) -> SessionCache:
        """Open the tiers for pages of weights with this fingerprint. Entries on disk are looked at later."""
        config = plan.config
        if not config.prefix_cache:
            return cls(plan, None)
        identity, disk = plan.page_identity(fingerprint, plan.name), None
        pages = plan.caches[0]
        if pages.disk_bytes:
            disk = others.disk(config.cache_folder, pages.disk_bytes, identity)
        return cls(plan, Tiers(others.host(pages.host_bytes), CostModel(config.page_size), disk, identity=identity))

    @property
    def all_tiers(self) -> list[Tiers]:
        return [each for each in (self.tiers, *(store.tiers for store in self.stores)) if each is not None]

    def schedule(self, programs: SessionPrograms, program_wait: ProgramWait) -> Scheduler | DataScheduler:
        """Make the scheduler with its page pools and prefix caches."""
        scheduler, self._tree = _scheduling(self._plan, self, programs, program_wait)
        for each in self.all_tiers:
            each.busy = lambda: scheduler.has_work
        return scheduler

    def restore(self, runner: Runner, programs: SessionPrograms, show: Callable[[str], None]) -> None:
        """Restore the pages that the session was opened with, and prepare for a request for them."""
        name, tiers, tree = self._plan.config.restores, self.tiers, self._tree
        if tiers is None:
            return
        if name is None:
            self._find_stored(programs)
            return
        show(f"restoring {name}")
        # Before waiting for programs, so that pages are read meanwhile.
        runner.prefault(restore(tree, tiers, name).pages)
        for store in self.stores:
            restore_side(store.tiers, name)
        for data in () if tree is None else tree.data:
            if tiers.disk is not None:
                data.restore(tiers.disk)
        for drafter in self.drafters:
            if tree is not None and drafter.most_tokens:
                drafter.remember(known_texts(tree, drafter.most_tokens))
        ready = programs.restorable()  # a request for restored pages is likely to come at once
        fills = programs.all.lattice.fills
        fillable = {*fills} <= {*ready} or programs.all.moved_by_host(fills)
        if runner.rehearse(ready) and isinstance(tree, PrefixCache) and fillable:
            promote(tree, runner.fill, page_bytes=0 if tiers.disk is None else tiers.disk.page_bytes)

    def _find_stored(self, programs: SessionPrograms) -> None:
        """Let prompts find the pages of earlier sessions, in a notebook.

        Their indices are read in a thread while the opening waits for programs and vocabulary, and the pages when a
        prompt hits them first, unless that would compile a program.
        """
        config, tiers = self._plan.config, self.tiers
        wanted = config.restore is None and config.processes == 1 and in_notebook()
        if not wanted or tiers is None or tiers.disk is None:
            return
        tiers.fillable, tiers.finds_stored = programs.fillable, True

        def look() -> None:
            programs.fillable()
            for each in self.all_tiers:
                if each.disk is not None:
                    each.disk.scan()

        self._looking = threading.Thread(target=look, name="rekindle kept pages", daemon=True)
        self._looking.start()

    def opened(self) -> None:
        """Wait for the indices of pages on disk, so that a first prompt finds them; `LOOK_SECONDS` at most."""
        if self._looking is not None:
            self._looking.join(LOOK_SECONDS)

    def use(self, fingerprint: str, name: str) -> bytes:
        """Keep pages of other weights from now on. Return the root key of the trees for them."""
        identity = self._plan.page_identity(fingerprint, name)
        if self.tiers is not None:
            self.tiers.identity = identity
        for store in self.stores:
            store.follow(identity)
        return identity.root

    def drop_altered(self, digest: str) -> None:
        """Drop the pages that depend on a digest, from device and host memory."""
        for tree in () if self._tree is None else self._tree.trees:
            tree.drop_altered(digest, None if self.tiers is None else self.tiers.host.discard)

    def lose_drafts(self) -> None:
        """Notify drafters that their state on the device was lost."""
        for drafter in self.drafters:
            drafter.lost()

    def close(self) -> None:
        for each in self.all_tiers:
            each.close()


def _scheduling(
    plan: Blueprint, below: SessionCache, owner: SessionPrograms, program_wait: ProgramWait
) -> tuple[Scheduler | DataScheduler, AnyCache | None]:
    """Make the scheduler, and the cache that it keeps pages in: None where requests share no pages."""
    config, programs = plan.config, owner.all
    limits = _limits(plan, programs)
    drafters = below.drafters = plan.drafts.drafters(limits)
    root = b"" if below.tiers is None or below.tiers.identity is None else below.tiers.identity.root
    made = [one.page_data(config, root) for one in plan.capabilities]  # a digest says enough in every tree
    data = [one for one in made if one is not None]

    def cache_of(pool: PagePool) -> PrefixCache | None:
        if below.tiers is None:
            return None
        return PrefixCache(pool, limits.page_size, root, host_tier=below.tiers, sides=below.sides, data=data)

    pools = [PagePool(programs.packing.pages, first=first) for first in programs.packing.first_pages]
    caches = [*map(cache_of, pools)]
    if len(pools) > 1:
        from rekindle._src.data_shards.scheduler import DataScheduler  # most sessions have one

        shards = DataScheduler.over(
            limits,
            pools,
            caches,
            policy=config.policy,
            seed=config.seed,
            program_wait=program_wait,
            drafters=drafters,
        )
        return shards, shards.cache
    scheduler = Scheduler(
        limits,
        pools[0],
        cache=caches[0],
        policy=config.policy,
        seed=config.seed,
        room=next((room for one in plan.capabilities if (room := one.room(plan.programs)) is not None), None),
        sides=below.sides,
        program_wait=program_wait,
        programs=owner.on_demand(),
        drafters=drafters,
    )
    return scheduler, caches[0]


def _limits(plan: Blueprint, programs: Programs) -> Limits:
    """Return the limits of each scheduler. The queue's limit is for all of them together."""
    one, model = programs.config, plan.model
    padded = not traits(plan.graph.precision.implementation).skips_padding
    limits = Limits.of(
        one,
        max_prefill_rows=prefill_rows(one.max_tokens_per_step, one.max_requests),
        padded=padded,
        edge=max((each.edge for each in programs.recipes.sides), default=1),
        whole=model.is_bidirectional,
    )
    # The admission limiter bounds the queue; a burst may be queued whole before the first of it runs.
    places = plan.config.max_queue + plan.config.max_requests
    return dataclasses.replace(
        limits,
        max_queue=places + spare_places(places),
        longest=model.max_position_embeddings,
        repeated_steps=MOST_STEPS if programs.lattice.repeated else 1,
        repeated_rows=max((program.rows for program in programs.lattice.repeated), default=1),
    )
