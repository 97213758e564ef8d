"""The grammars of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.capabilities.guides.request import GRAMMARS, THINK_IDS
from rekindle._src.capabilities.guides.step import Guides
from rekindle._src.capabilities.plans import CapabilityPlan, Owner, Provider, SessionPlan
from rekindle._src.dispatch.backend import SessionService
from rekindle._src.programs.late_masks import LateMasks
from rekindle._src.structured.grammar import Grammars

if TYPE_CHECKING:
    from rekindle._src.text.tokenizer import Tokenizer


class GuidesPlan(CapabilityPlan):
    """Any session with a tokenizer follows grammars."""

    @property
    def masks(self) -> LateMasks:
        return Guides()

    def open(self, session: SessionPlan, tokenizer: Tokenizer | None) -> Owner:
        assert tokenizer is not None, "it is opened late"
        services: dict[SessionService[Any], Any] = {}
        if (think_ids := tokenizer.pair("<think>", "</think>")) is not None:
            services[THINK_IDS] = think_ids
        if tokenizer.has_text:
            services[GRAMMARS] = Grammars(tokenizer, session.programs.model.vocab_size, session.config.max_requests)
        return Provider(services)
