"""The way out of a sequence that another process has taken in: its events go there as they are."""

from __future__ import annotations

from collections.abc import Callable

from rekindle._src.core.records import FinishReason, Request, TokenEvent
from rekindle._src.dispatch.mailbox import Mailbox, Relayed

Take = Callable[[TokenEvent, float], object]  # called with an event and the time at which the sequence first ran


class RelayedOutput:
    """An `Output` without a text: tokens are decoded, and stop strings matched, in the process that reads them."""

    __slots__ = ("_mailbox", "_take", "request", "started")

    def __init__(self, request: Request, mailbox: Mailbox, take: Take) -> None:
        self.request, self._mailbox, self._take = request, mailbox, take
        self.started = 0.0  # when it first ran

    def take(self, event: TokenEvent, now: float) -> FinishReason | None:
        """Pass an event on."""
        self._take(event, self.started)
        return event.finish_reason

    def complete(self, reason: FinishReason, error: BaseException | None, now: float) -> None:
        """End the sequence; its reader knows the reason from the last event."""
        self._mailbox.complete(0, Relayed(reason) if error is None else error)
