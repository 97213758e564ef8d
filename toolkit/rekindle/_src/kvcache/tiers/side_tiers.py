"""The tiers of side caches: host memory of their own, and the disk that pages have, under identities of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rekindle._src.kvcache.caches import AnyCache
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.side import SideCache, SidePlan
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.host import HostTier
from rekindle._src.kvcache.tiers.tiers import CostModel, Tiers


def open_sides(plans: Sequence[SidePlan], pages: Tiers | None) -> tuple[SideCache, ...]:
    """Open the side caches of a session, in the order of their plans, next to the tiers of its `pages`."""
    return tuple(plan.cache(side_tiers(plan, pages), number=number) for number, plan in enumerate(plans))


def side_tiers(plan: SidePlan, pages: Tiers | None) -> Tiers | None:
    """Return the tiers of entries, which share the disk and its budget with `pages`; None if those are not stored."""
    if pages is None or pages.identity is None:
        return None
    costs, identity = CostModel(plan.page_size), plan.identity(pages.identity)
    costs.mode = plan.costs
    disk = None if pages.disk is None else DiskTier(pages.disk.folder, pages.disk.budget, identity)
    return Tiers(HostTier(plan.host_bytes), costs, disk, identity=identity)


class SideStore(NamedTuple):
    """A side cache that has tiers."""

    cache: SideCache
    tiers: Tiers

    @property
    def identity(self) -> Identity:
        """The identity that its entries are stored under; changes with the weights."""
        assert self.tiers.identity is not None, "tiers of side caches have one"
        return self.tiers.identity

    def follow(self, pages: Identity) -> None:
        """Store entries for pages of another identity from now on."""
        self.tiers.identity = self.cache.plan.identity(pages)


def stores_of(sides: Sequence[SideCache]) -> tuple[SideStore, ...]:
    """Return the side caches that have tiers."""
    return tuple(SideStore(side, side.tier) for side in sides if isinstance(side.tier, Tiers))


def side_stores(cache: AnyCache | None) -> tuple[SideStore, ...]:
    """Return the side stores of a prefix cache."""
    return () if cache is None else tuple(store for tree in cache.trees for store in stores_of(tuple(tree.sides)))
