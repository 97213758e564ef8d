"""Captures and changes inside the model: the taps of requests, and of the session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class CapturesEntry(CapabilityEntry):
    """Reading and changing a model between its layers and inside them."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.captures.request import TapIntake

        return (TapIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.captures.plan import CapturesPlan

        return CapturesPlan(tuple(arguments.taps), arguments.steering)
