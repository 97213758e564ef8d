"""The output of a request so far: the half of a handle that is read while it runs and afterwards."""

from __future__ import annotations

from rekindle._src.core.records import TextDelta, TokenLogprobs
from rekindle._src.core.reply import ToolCall
from rekindle._src.dispatch.mailbox import Mailbox
from rekindle.errors import InvalidRequest


class Produced:
    """Text, tokens and log-probabilities of a request. They stay when it is interrupted."""

    id: str
    _mailbox: Mailbox
    _submitted: bool
    _queued: bool  # submitted, or waiting for a place

    @property
    def text(self) -> str:
        """The text so far, of the first sequence; it stays when the request is interrupted.

        This and the other results raise `InvalidRequest` if the request was neither submitted nor awaited.
        """
        return "".join(delta.text for delta in self._first)

    @property
    def content(self) -> str:
        """The answer so far, of the first sequence: the text without reasoning and calls of tools."""
        return "".join(delta.content for delta in self._first)

    @property
    def reasoning(self) -> str:
        """The reasoning so far, of the first sequence."""
        return "".join(delta.reasoning for delta in self._first)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far, of the first sequence."""
        return tuple(call for delta in self._first for call in delta.tool_calls)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids so far, of the first sequence."""
        return tuple(token for delta in self._first for token in delta.token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities so far, of the first sequence, if the request has them."""
        return tuple(entry for delta in self._first for entry in delta.logprobs)

    @property
    def deltas(self) -> tuple[TextDelta, ...]:
        """Every delta so far, of all sequences."""
        self._check_submitted()
        return tuple(self._mailbox.deltas)

    @property
    def _first(self) -> list[TextDelta]:
        self._check_submitted()
        return [delta for delta in self._mailbox.deltas if delta.index == 0]

    def _check_submitted(self) -> None:
        if not (self._queued or self._submitted or self._mailbox.ended):
            raise InvalidRequest(
                "handle",
                self.id,
                "has no results, because it was neither awaited nor submitted",
                "Write done = await session.generate(…) and done.text, or handle = session.submit(…) for text so far",
            )
