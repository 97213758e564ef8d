"""Pictures in prompts: read, spelled, encoded, kept, and put in the place of tokens' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class PicturesEntry(CapabilityEntry):
    """Pictures in prompts, for models that read them."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.pictures.request import PictureIntake

        return (PictureIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.pictures.plan import PicturesPlan

        return PicturesPlan.of(arguments)
