"""Log-probabilities of the output, of the prompt, and of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.dispatch.capability import Capability


class ScoresEntry(CapabilityEntry):
    """Log-probabilities of the output, of the prompt, and of the whole vocabulary."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.scores.request import ScoreIntake

        return (ScoreIntake(),)
