"""An entry in the list of capabilities.

Entries are imported wherever requests are made, also without JAX. So they import what they make when they make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class CapabilityEntry:
    """A capability that does nothing, and the base of all others."""

    def intake(self) -> Sequence[Capability]:
        """Return new objects that take part in intake, in the order of their checks."""
        return ()

    def plan(self, arguments: OpenArguments) -> CapabilityPlan | None:
        """Return its plan for an opening; None if it plans nothing. Raise typed errors for damaged files."""
        return None
