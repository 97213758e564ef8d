"""Adapters that requests add to the model's weights, each row its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class AdaptersEntry(CapabilityEntry):
    """Adapters of requests, and one that is merged into the weights."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.adapters.request import AdapterIntake

        return (AdapterIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.adapters.plan import AdaptersPlan

        return AdaptersPlan(arguments.adapters, arguments.merge)
