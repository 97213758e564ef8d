"""Captures in a session's blueprint: the sites of the model, and the taps and changes that have a name there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.captures.custom import Tap
from rekindle._src.capabilities.captures.kept import KeptCaptures
from rekindle._src.capabilities.captures.request import TAPS
from rekindle._src.capabilities.captures.step import session_facts, tap_features, variants_of
from rekindle._src.capabilities.captures.tapped import TapFacts
from rekindle._src.capabilities.plans import CapabilityPlan, Owner, Provider, SessionPlan
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.taps import Steer
from rekindle._src.kvcache.page_data import PageData
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.plan import ProgramPlan

if TYPE_CHECKING:
    from rekindle._src.text.tokenizer import Tokenizer


class CapturesPlan(CapabilityPlan):
    """The taps of a session. Models that several processes share have none."""

    def __init__(self, taps: tuple[Tap, ...] = (), steering: Mapping[str, tuple[Steer, ...]] | None = None) -> None:
        self._taps, self._steering = taps, steering or {}

    @property
    def ahead(self) -> ProgramVariant:
        return variants_of(self._steering)

    @property
    def key(self) -> Mapping[str, object]:
        return {"taps": [tap.key for tap in self._taps]}

    def features(self, plan: ProgramPlan) -> Sequence[Feature]:
        return tap_features(plan.model, plan.config, plan.placement, self._taps, self.ahead)

    def check(self, programs: ProgramPlan) -> None:
        self._sites(programs, programs.config)

    def facts(self, programs: ProgramPlan) -> Mapping[str, object]:
        sites = self._sites(programs, programs.config)
        if sites is None:
            return {"taps": None, "steering": {}}
        return {
            "taps": {site: list(layers) for site, layers in sites.sites.items()},
            "steering": {name: [*map(str, changes)] for name, changes in sites.steering.items()},
        }

    def page_data(self, config: ResolvedConfig, root_key: bytes) -> PageData:
        return KeptCaptures(config.capture_memory, config.page_size, root_key)

    def open(self, session: SessionPlan, tokenizer: Tokenizer | None) -> Owner | None:
        sites = self._sites(session.programs, session.config)
        return None if sites is None else Provider({TAPS: sites})

    def _sites(self, programs: ProgramPlan, config: ResolvedConfig) -> TapFacts | None:
        return session_facts(programs.model, config, self._taps, self._steering)
