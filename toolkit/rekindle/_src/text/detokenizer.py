"""Token ids to text while they arrive. Text is final once delivered, and its sum equals decoding all ids at once.

The DecodeStream of tokenizers decodes the same way but can't be ended: bytes of an unfinished character at the end of a
reply are never delivered, and a run of invalid bytes is held for ever. The two streams here can be flushed.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rekindle._src.text.tokenizer import Tokenizer
from rekindle._src.text.tokenizer_limits import byte_of_character
from rekindle.errors import InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class FinalText(NamedTuple):
    """The text that became final, and the stop string that ended the sequence, or None."""

    text: str
    stopped: str | None


class _Stream(Protocol):
    @property
    def open(self) -> bool: ...  # some tokens' text is not out yet
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Detokenizer:
    """Decodes one sequence and delivers its text as soon as no later token can change it.

    Unfinished characters, and all text that may be the beginning of a stop string, are held back. Of several stop
    strings the one that is complete first ends the text, the longest if two end together; so the result does not depend
    on how tokens were grouped into pushes. `released` counts the tokens with fully delivered text: their ids and
    log-probabilities may leave with it.

    Special tokens have no text, except those named in `visible`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        visible: frozenset[str] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if stop and not tokenizer.has_text:
            raise InvalidRequest(
                "stop", tuple(stop), "needs text, and the model has no tokenizer.json", "Use stop_token_ids"
            )
        self._stream = _stream(tokenizer, skip_special_tokens, visible)
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""  # decoded, not delivered: ends with a proper beginning of a stop string
        self._marks: list[tuple[int, int]] = []  # (tokens, characters decoded when the last of them had arrived)
        self._decoded = 0
        self._delivered = 0
        self.stopped: str | None = None
        self.tokens = 0  # pushed so far, except those after a completed stop string
        self.released = 0
        self.ends = array("Q")  # characters decoded when each token had arrived

    def push(self, token_ids: Sequence[int]) -> FinalText:
        """Decode the next tokens. After a stop string, tokens are ignored and no more text is returned."""
        text = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.tokens += 1
            text.append(self._take(self._stream.push(token_id), final=False))
            self.ends.append(self._decoded)
        return FinalText("".join(text), self.stopped)

    def flush(self) -> str:
        """Return the remaining text, when no token follows. It may complete a stop string: see `stopped`."""
        if self.stopped is not None:
            return ""
        text = self._take(self._stream.flush(), final=True)
        self.released = self.tokens
        return text

    def _take(self, piece: str, *, final: bool) -> str:
        self._decoded += len(piece)
        text = self._held + piece
        match = self._search(text, len(self._held)) if piece and self.tokens > self._min_tokens else None
        if match is not None:
            start, self.stopped = match
            self._held = ""
            self.released = self.tokens
            return text[: start + len(self.stopped) if self._include_stop else start]
        hold = 0 if final else self._undecided(text)
        out, self._held = text[: len(text) - hold], text[len(text) - hold :]
        self._delivered += len(out)
        self._release()
        return out

    def _search(self, text: str, fresh: int) -> tuple[int, str] | None:
        """Return the stop string that is complete first. None ends within `text[:fresh]`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, fresh - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _undecided(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stop):
                return size
        return 0

    def _release(self) -> None:
        # While the stream is open, such as after half an emoji, the token's own text is still to come.
        if not self._stream.open:
            self._marks.append((self.tokens, self._decoded))
        while self._marks and self._marks[0][1] <= self._delivered:
            self.released = self._marks.pop(0)[0]


def _stream(tokenizer: Tokenizer, skip_special_tokens: bool, visible: frozenset[str]) -> _Stream:
    if not tokenizer.has_text:
        return _NoText()
    skipped = tokenizer.hidden_ids(visible) if skip_special_tokens else frozenset()
    kinds = tokenizer.decoder_kinds
    if kinds in ({"ByteLevel"}, {"ByteLevel", "Fuse"}):
        return _ByteLevelStream(tokenizer, skipped)
    return _WindowStream(tokenizer, skipped, bytewise="ByteLevel" in kinds)


class _NoText:
    """The stream of a model without a tokenizer: token ids, no text."""

    open = False

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


BYTES = byte_of_character()


class _ByteLevelStream:
    """The stream for byte-level BPE: tokens are bytes, decoded incrementally as UTF-8, in 2 to 4 µs each.

    Python and Rust both replace each maximal part of an ill-formed sequence by one U+FFFD, so that the result equals
    that of tokenizers, also for invalid bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def open(self) -> bool:
        return self._decoder.getstate()[0] != b""

    def push(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._tokenizer.token(token_id)
        if token is None:
            return ""
        try:
            data = bytes([BYTES[character] for character in token])
        except KeyError:  # an added token outside the alphabet is text already
            data = token.encode()
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """The stream for any other decoder: it decodes the open tokens after the last closed one, less that one's text.

    Decoders look one token back: does a word start (Strip, WordPiece), does a token repeat (CTC)?
    A run of byte tokens stays open until another token follows, since tokenizers replaces every byte of a run that is
    not UTF-8 as a whole: a later byte can still change an earlier one.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], *, bytewise: bool) -> None:
        self._tokenizer, self._skipped, self._bytewise = tokenizer, skipped, bytewise
        self._context: list[int] = []
        self._context_text = ""
        self._open: list[int] = []

    @property
    def open(self) -> bool:
        return bool(self._open)

    def push(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._open.append(token_id)
        if _BYTE_TOKEN.fullmatch(token) or (self._bytewise and self._decode(self._open).endswith("\ufffd")):
            return ""
        return self._close(token_id)

    def flush(self) -> str:
        return self._close(self._open[-1]) if self._open else ""

    def _close(self, last: int) -> str:
        text = self._decode([*self._context, *self._open])[len(self._context_text) :]
        self._open = []
        self._context = [last]
        self._context_text = self._decode(self._context)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the UTF-8 bytes of a token, which may be part of a character; empty for an id without a token."""
    spelling = tokenizer.token(token_id)
    if spelling is None:
        return b""
    if token_id in tokenizer.special_ids:
        return spelling.encode()
    kinds = tokenizer.decoder_kinds
    if "ByteLevel" in kinds:
        try:
            return bytes([BYTES[character] for character in spelling])
        except KeyError:  # an added token outside the alphabet is text already
            return spelling.encode()
    if (byte := _BYTE_TOKEN.fullmatch(spelling)) is not None:
        return bytes([int(byte[1], 16)])
    return (spelling.replace("▁", " ") if kinds & {"Metaspace", "Replace"} else spelling).encode()
