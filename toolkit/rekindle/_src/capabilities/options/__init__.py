"""Options of requests that need no more than a check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.dispatch.capability import Capability


class OptionsEntry(CapabilityEntry):
    """Token ids, and names of logits processors."""

    own_options = frozenset(("until", "stop_repeats"))  # texts end where they are decoded

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.options.request import ProcessorIntake, TokenIdIntake

        return TokenIdIntake(), ProcessorIntake()


class PriorityEntry(CapabilityEntry):
    """The order of requests."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.options.request import PriorityIntake

        return (PriorityIntake(),)
