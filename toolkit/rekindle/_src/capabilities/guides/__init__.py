"""Guides: grammars and rules for the tokens that a text may go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class GuidesEntry(CapabilityEntry):
    """Structures of texts, and tokens that may not come."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.guides.request import StructureIntake

        return (StructureIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.guides.owner import GuidesPlan

        return GuidesPlan()
