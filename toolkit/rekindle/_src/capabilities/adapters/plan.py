"""Adapters in a session's blueprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.plans import CapabilityPlan, Owner, SessionPlan
from rekindle._src.programs.adapters import adapter_features
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.plan import ProgramPlan

if TYPE_CHECKING:
    from rekindle._src.text.tokenizer import Tokenizer


class AdaptersPlan(CapabilityPlan):
    """The adapters that a session is opened with, and one that is merged into its weights."""

    early = True

    def __init__(self, sources: Mapping[str, object], merge: object = None) -> None:
        self._sources, self._merge = sources, merge

    @property
    def ahead(self) -> ProgramVariant:
        return ProgramVariant.ADAPTERS if self._sources else PLAIN_VARIANT

    def features(self, plan: ProgramPlan) -> Sequence[Feature]:
        return adapter_features(plan.graph, plan.config, plan.placement, self.ahead)

    def open(self, session: SessionPlan, tokenizer: Tokenizer | None) -> Owner:
        from rekindle._src.capabilities.adapters.owner import AdapterShelf

        return AdapterShelf.open(session, self._sources, self._merge)
