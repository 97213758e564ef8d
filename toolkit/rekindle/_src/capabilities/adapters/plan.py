"""Adapters in a session's blueprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.adapters.slots import AdapterSlots, units_for
from rekindle._src.capabilities.adapters.step import AdapterOption, Adapters, Stacks
from rekindle._src.capabilities.plans import CapabilityPlan, Owner, SessionPlan
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.scheduling.admission import DeviceRoom

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
        if _refused(plan):
            return ()
        graph = plan.graph
        stacks = Stacks(lambda: sites_of(graph.config).sites, _units(plan), graph.precision.weights, plan.placement)
        part = Adapters(stacks, ahead=bool(self._sources), implementation=graph.precision.implementation)
        return (Feature(AdapterOption(stacks), part),)

    def room(self, programs: ProgramPlan) -> DeviceRoom | None:
        return None if _refused(programs) else AdapterSlots(programs.config.max_adapters, _units(programs))

    def open(self, session: SessionPlan, tokenizer: Tokenizer | None) -> Owner:
        from rekindle._src.capabilities.adapters.owner import AdapterShelf

        return AdapterShelf.open(session, self._sources, self._merge, refused=_refused(session.programs))


def _units(programs: ProgramPlan) -> int:
    """Return how many units of rank all adapters on the device have together."""
    return programs.config.max_adapters * units_for(programs.config.max_adapter_rank)


def _refused(programs: ProgramPlan) -> str:
    """Return why no request can have an adapter; empty if requests can."""
    if not programs.config.max_adapters:
        return "the session was opened with max_adapters=0"
    divided = programs.placement.data > 1 or programs.placement.processes > 1
    return "the model has several data shards, or several processes share it" if divided else ""
