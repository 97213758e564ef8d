"""Chats that outgrow the context: the oldest turns leave the prompt, and the completion says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.dispatch.capability import Capability


class OverflowEntry(CapabilityEntry):
    """Chats that outgrow the context."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.overflow.request import OverflowIntake

        return (OverflowIntake(),)
