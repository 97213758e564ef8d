"""Embeddings: the hidden states of a prompt, pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.core.extension import Extension, SentExtension
    from rekindle._src.core.records import Request
    from rekindle._src.dispatch.capability import Capability


class PoolingEntry(CapabilityEntry):
    """Embeddings: the hidden states of a prompt, pooled."""

    name = "pooling"

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.pooling.request import EmbeddingIntake

        return (EmbeddingIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.pooling.step import PoolingPlan

        return PoolingPlan()

    def sent(self, request: Request) -> SentExtension | None:
        from rekindle._src.capabilities.pooling.request import PromptPooling
        from rekindle._src.core.extension import SentExtension

        pooling = request.extensions.get(PromptPooling)
        return None if pooling is None else SentExtension(pooling.kind)

    def received(self, fields: Any) -> Extension:
        from rekindle._src.capabilities.pooling.request import PromptPooling
        from rekindle._src.core.records import Pooling

        if fields not in get_args(Pooling):
            raise ValueError(f"it pools by {fields!r}")
        return PromptPooling(fields)
