"""Embeddings: the hidden states of a prompt, pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class PoolingEntry(CapabilityEntry):
    """Embeddings: the hidden states of a prompt, pooled."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.pooling.request import EmbeddingIntake

        return (EmbeddingIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.pooling.step import PoolingPlan

        return PoolingPlan()
