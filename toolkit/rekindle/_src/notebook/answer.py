"""The answer that a model wrote last in a chat, or is writing: the requests that made it, and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rekindle._src.core.records import FinishReason, TextDelta, TokenLogprobs
from rekindle._src.core.reply import ContentDelta, Reply, ReplyEvent, fold
from rekindle._src.notebook.live import RequestLike, SessionLike
from rekindle._src.views.replies import NO_FIGURES, ReasoningFigures
from rekindle.errors import RequestAborted


class Piece(NamedTuple):
    """Tokens that became final text together. An answer can be forked before each piece."""

    text: str
    token_ids: tuple[int, ...]
    events: tuple[ReplyEvent, ...] | None  # its part of the reply; None if unknown, after a fork

    @classmethod
    def of(cls, delta: TextDelta) -> Piece:
        return cls(delta.text, delta.token_ids, (ContentDelta(delta.text),) if delta.events is None else delta.events)


class LastAnswer(NamedTuple):
    """Its requests, the session that made them, and the pieces that a fork kept."""

    handle: RequestLike
    origin: RequestLike  # the request that it was forked from, or `handle`
    session: SessionLike
    kept: tuple[Piece, ...] = ()
    joined: int = 0  # tokens of the answer that the prompt of `origin` ends with
    follows: bool = True  # False once messages that are in the prompt of `origin` have left the conversation

    @property
    def pieces(self) -> list[Piece]:
        return [*self.kept, *(Piece.of(delta) for delta in self.handle.deltas if delta.index == 0)]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.token_ids)

    @property
    def reason(self) -> FinishReason | None:
        """The finish reason; None if it failed, or has not ended."""
        handle = self.handle
        if not handle.done:
            return None
        if isinstance(handle.error, RequestAborted):
            return FinishReason.ABORTED
        return next((delta.finish_reason for delta in reversed(handle.deltas) if delta.finish_reason), None)

    @property
    def refusal(self) -> BaseException | None:
        """The error of a request that failed before its first token; None for any other."""
        error = self.handle.error if self.handle.done else None
        failed = error is not None and not isinstance(error, RequestAborted)
        return error if failed and not self.token_ids else None

    @property
    def reply(self) -> Reply | None:
        """The parts of an answer with reasoning or calls. A fork has unknown ones."""
        pieces = self.pieces
        if any(piece.events is None for piece in pieces):
            return None
        reply = fold(event for piece in pieces for event in piece.events or ())
        return reply if reply.reasoning or reply.tool_calls or reply.unread else None

    @property
    def figures(self) -> ReasoningFigures:
        """How much the model reasoned, once it has ended an answer that was made at once."""
        completion = None if self.kept or not self.handle.done else self.handle.so_far()
        return NO_FIGURES if completion is None else ReasoningFigures.of(completion)

    def logprobs(self, index: int) -> TokenLogprobs | None:
        """Return the known likely tokens at a place of the answer, or None."""
        place = index - sum(len(piece.token_ids) for piece in self.kept)
        for delta in self.handle.deltas:
            if 0 <= place < len(delta.token_ids):
                return delta.logprobs[place] if len(delta.logprobs) > place and delta.logprobs[place].top_ids else None
            place -= len(delta.token_ids)
        return None

    def until(self, count: int, decode: Callable[[list[int]], str]) -> Iterator[Piece]:
        """Yield the pieces of the first `count` tokens. A piece cut in two loses text that was not final at the cut."""
        remaining = count
        for piece in self.pieces:
            if remaining <= 0:
                return
            if len(piece.token_ids) <= remaining:
                yield piece
            else:
                yield Piece(decode(list(piece.token_ids[:remaining])), piece.token_ids[:remaining], None)
            remaining -= len(piece.token_ids)


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]
