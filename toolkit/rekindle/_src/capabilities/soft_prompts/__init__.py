"""Rows of a caller's in the place of embeddings: soft prompts, mixed with text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class SoftPromptsEntry(CapabilityEntry):
    """Rows of a caller's in the place of embeddings."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.soft_prompts.request import SoftPromptIntake

        return (SoftPromptIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.soft_prompts.plan import SoftPromptsPlan

        return SoftPromptsPlan()
