"""The device memory that a session will take, computed before anything is loaded."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rekindle._src.capabilities import complete
from rekindle._src.opening.blueprint import blueprint
from rekindle._src.opening.build import attach_caches
from rekindle._src.opening.open_request import OpenRequest
from rekindle._src.opening.source import source_of
from rekindle._src.programs.user_functions import check_processors


class PlannedMemory(NamedTuple):
    """Bytes of the devices of one session."""

    weights: int  # with those of drafters and capabilities
    caches: int  # pages, states and windows

    @property
    def total(self) -> int:
        return self.weights + self.caches


def planned_memory(request: OpenRequest) -> PlannedMemory:
    """Read a checkpoint's headers, and plan its opening. Raise typed errors if it can't be opened."""
    attach_caches(request.config)
    processors, additions = check_processors(request.processors), complete(request.additions)
    request = dataclasses.replace(request, processors=processors, additions=additions)
    plan = blueprint(request, source_of(request))
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in plan.programs.leaves)
    weights += plan.drafts.device_bytes + sum(one.device_bytes for one in plan.capabilities)
    return PlannedMemory(weights, sum(cache.slots * cache.slot_bytes for cache in plan.caches))
