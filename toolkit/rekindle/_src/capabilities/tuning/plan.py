"""Tuning in a session's blueprint: programs are made when they are asked for, and nothing is planned ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._src.capabilities.plans import CapabilityPlan, Owner, SessionPlan

if TYPE_CHECKING:
    from rekindle._src.text.tokenizer import Tokenizer


class TuningPlan(CapabilityPlan):
    """Models on one device, in one process, can be tuned."""

    def open(self, session: SessionPlan, tokenizer: Tokenizer | None) -> Owner | None:
        placement = session.programs.placement
        if placement.size * placement.data * placement.processes > 1:
            return None
        from rekindle._src.capabilities.tuning.owner import TuningPrograms

        return TuningPrograms(session.programs)
