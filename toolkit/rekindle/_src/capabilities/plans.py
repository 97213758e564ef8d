"""The plans of capabilities in a session's blueprint, and what an open session owns for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from rekindle._src.capabilities.additions import NO_ADDITIONS, CheckedAdditions
from rekindle._src.core.config import EngineConfig, ResolvedConfig
from rekindle._src.dispatch.backend import NO_SERVICES, Services
from rekindle._src.kvcache.page_data import PageData
from rekindle._src.models.base import LoadedModel
from rekindle._src.programs.plan import ProgramAddition, ProgramPlan
from rekindle._src.scheduling.admission import DeviceRoom

if TYPE_CHECKING:
    from rekindle._src.models.loading.checkpoint import CheckpointPlan
    from rekindle._src.text.tokenizer import Tokenizer


class OpenArguments(NamedTuple):
    """The arguments of `open` that capabilities plan with."""

    config: EngineConfig  # as the model completes it, and not resolved
    additions: CheckedAdditions = NO_ADDITIONS
    checkpoint: CheckpointPlan | None = None  # None for a model in memory


class SessionPlan(NamedTuple):
    """The plan of a session, as far as the owners of capabilities are opened from it."""

    name: str  # of the model
    config: ResolvedConfig
    programs: ProgramPlan
    precompile: str  # "all", "background" or "lazy"
    show: Callable[[str], None]  # shows the stage of the opening


class WeightsChange(NamedTuple):
    """A change of the model's weights, before anything runs and after each swap."""

    stage: str  # of the opening, in words
    change: Callable[[LoadedModel], LoadedModel]


class Owner:
    """The objects that an open session owns for a capability. This one owns nothing; it is the base of all others."""

    change: WeightsChange | None = None

    @property
    def services(self) -> Services:
        """The services that requests find in the session's front."""
        return NO_SERVICES

    def sleep(self) -> int:
        """Give the memory of its weights back. Return their bytes."""
        return 0

    def wake(self) -> None:
        """Go on."""

    def close(self) -> None:
        """Free its resources."""


class Provider(Owner):
    """An owner of values that need no closing."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @property
    def services(self) -> Services:
        return self._services


class CapabilityPlan(ProgramAddition):
    """A capability's part of a session's blueprint. This one plans nothing; it is the base of all others."""

    early: bool = False  # its owner is opened before anything takes long, without the tokenizer

    @property
    def device_bytes(self) -> int:
        """Bytes of memory on each device for weights of its own."""
        return 0

    def room(self, programs: ProgramPlan) -> DeviceRoom | None:
        """Return the room on the device that its requests need in addition to pages; None if they need none."""
        return None

    def check(self, programs: ProgramPlan) -> None:
        """Raise ConfigError for arguments of `open` that don't fit the model."""

    def page_data(self, config: ResolvedConfig, root_key: bytes) -> PageData | None:
        """Return the data that it keeps for pages, which are named from `root_key` on; None if it keeps none."""
        return None

    def facts(self, programs: ProgramPlan) -> Mapping[str, object]:
        """Return all that it decides, as values that JSON keeps."""
        return {}

    def open(self, session: SessionPlan, tokenizer: Tokenizer | None) -> Owner | None:
        """Open its owner; None if the session owns nothing for it. Only an `early` owner has no tokenizer."""
        return None
