"""Adapters that requests add to the model's weights, each row its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry
from rekindle._src.core.names import checked_name
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.capabilities.additions import Additions, CheckedAdditions
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.dispatch.capability import Capability


class AdaptersEntry(CapabilityEntry):
    """Adapters of requests, and one that is merged into the weights."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.adapters.request import AdapterIntake

        return (AdapterIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.adapters.plan import AdaptersPlan

        return AdaptersPlan(arguments.additions.get("adapters", {}), arguments.additions.get("merge"))

    def checked(self, additions: Additions) -> CheckedAdditions:
        own: CheckedAdditions = {}
        if (adapters := additions.get("adapters")) is not None:
            own["adapters"] = _named(adapters)
        if (merge := additions.get("merge")) is not None:
            own["merge"] = merge
        return own


def _named(adapters: object) -> dict[str, object]:
    if not isinstance(adapters, Mapping):
        raise ConfigError("adapters", adapters, "does not map names to adapters", 'Pass {"name": folder}')
    return {checked_name("adapters", name): source for name, source in adapters.items()}
