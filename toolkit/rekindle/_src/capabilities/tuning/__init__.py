"""Adapters that are trained on the open model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments


class TuningEntry(CapabilityEntry):
    """Adapters that are trained on the open model's weights."""

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.tuning.plan import TuningPlan

        return TuningPlan()
