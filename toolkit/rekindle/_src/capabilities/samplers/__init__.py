"""Samplers of llama.cpp, beyond temperature, top_k, top_p and min_p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class SamplersEntry(CapabilityEntry):
    """Samplers beyond temperature, top_k, top_p and min_p, and an order of them all."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.samplers.request import SamplersIntake

        return (SamplersIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.samplers.step import SamplersPlan

        return SamplersPlan()
