"""Gradients of a prompt's next token, at the sites inside the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments


class GradientsEntry(CapabilityEntry):
    """Gradients of a prompt's next token, at the sites inside the model."""

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.gradients.plan import GradientsPlan

        return GradientsPlan()
