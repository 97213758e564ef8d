"""The seam of drafters: all that a session asks of one, whatever its tokens come from.

A `DraftKind` is a value, known before weights are read, so that a blueprint has it: its rule on the host, its programs
and what they read of the model, the memory it takes, and its part of the keys of pages. Weights are opened from it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.programs.drafting import NO_DRAFTS, DraftPrograms
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.sequence import Limits

if TYPE_CHECKING:
    from rekindle._src.drafts.weights import DraftWeights
    from rekindle._src.models.base import LoadedModel
    from rekindle._src.programs.programs import Programs
    from rekindle._src.text.tokenizer import Tokenizer


class DraftOpening(NamedTuple):
    """The owners that the weights of a drafter need."""

    programs: Programs
    show: Callable[[str], None]  # tells the user what is done
    lost: Callable[[], object]  # is called in the device thread when what a drafter has on the device was lost
    model: Callable[[], LoadedModel]  # returns the session's model, with the weights that it has then


class DraftKind(abc.ABC):
    """A drafter of a session. This base has no weights, and works on the host."""

    programs: DraftPrograms = NO_DRAFTS
    device_bytes = 0  # of its weights on each device
    fingerprint: str | None = None  # of its weights, if they are not the model's
    mark = ""  # follows the model's fingerprint in what pages are known by, where they have something of its own

    @abc.abstractmethod
    def drafter(self, limits: Limits) -> Drafter:
        """Return its rule on the host."""

    def page_bytes(self, config: ResolvedConfig) -> int:
        """Return the bytes that it adds to each page of the session. The config is resolved."""
        return 0

    def check(self, tokenizer: Tokenizer) -> None:  # noqa: B027  most have nothing to compare
        """Raise ConfigError unless the drafter has the same tokens as the model's tokenizer."""

    def open(self, opening: DraftOpening) -> DraftWeights | None:
        """Read its weights; None if it has none to call."""
        return None
