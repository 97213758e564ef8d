"""A chat's reply, read for reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.dispatch.capability import Capability


class RepliesEntry(CapabilityEntry):
    """A chat's reply, read for reasoning and calls of tools."""

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.replies.request import ReplyIntake

        return (ReplyIntake(),)
