"""Captures and changes inside the model: the taps of requests, and of the session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.additions import Additions, CheckedAdditions
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.core.contracts import TokenizerLike
    from rekindle._src.dispatch.backend import Front, Services
    from rekindle._src.dispatch.capability import Capability


class CapturesEntry(CapabilityEntry):
    """Reading and changing a model between its layers and inside them."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.captures.request import TapIntake

        return (TapIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.captures.plan import CapturesPlan

        return CapturesPlan(tuple(arguments.additions.get("taps", ())), arguments.additions.get("steering"))

    def checked(self, additions: Additions) -> CheckedAdditions:
        own: CheckedAdditions = {}
        if (taps := additions.get("taps")) is not None:
            from rekindle._src.capabilities.captures.additions import listed_taps

            own["taps"] = listed_taps(taps)
        if (steering := additions.get("steering")) is not None:
            from rekindle._src.capabilities.captures.additions import named_changes

            own["steering"] = named_changes(steering)
        return own

    def complete(self, additions: CheckedAdditions) -> CheckedAdditions:
        if "taps" not in additions:
            return {}
        from rekindle._src.capabilities.captures.custom import check_taps

        return {"taps": check_taps(additions["taps"])}

    def refuse_processes(self, additions: CheckedAdditions) -> None:
        from rekindle._src.capabilities.captures.additions import refuse_processes

        refuse_processes(additions)

    def facts(self, front: Front) -> tuple[str, ...]:
        from rekindle._src.capabilities.captures.request import steering_of

        return steering_of(front)

    def remote(self, facts: tuple[str, ...], tokenizer: TokenizerLike) -> Services:
        from rekindle._src.capabilities.captures.request import TAPS
        from rekindle._src.capabilities.captures.tapped import TapFacts

        return {TAPS: TapFacts.of_another_process(facts)}
