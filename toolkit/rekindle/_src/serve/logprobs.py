"""Log-probabilities in the two shapes of OpenAI's API, and in vLLM's shape for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from rekindle._src.core.records import TokenLogprobs
from rekindle._src.serve.bodies import Entries
from rekindle._src.text.detokenizer import token_bytes

LOWEST = -9999.0  # stands for minus infinity, which JSON lacks
_MOST_REMEMBERED = 65_536


class TokenNames:
    """The texts and bytes of tokens, each computed once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def get(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and its bytes. Half a character becomes �."""
        entry = self._known.get(token_id)
        if entry is None:
            data = token_bytes(self._tokenizer, token_id) if self._tokenizer.has_text else b""
            text = data.decode("utf-8", "replace") if self._tokenizer.has_text else f"token_id:{token_id}"
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            entry = self._known[token_id] = text, list(data)
        return entry


def finite(logprob: float) -> float:
    """Return the log-probability, or -9999 for minus infinity."""
    return logprob if logprob > LOWEST else LOWEST


class Offset:
    """The position of a choice's next token in its text, in characters. Part of a character counts once it is whole."""

    def __init__(self) -> None:
        self.at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: Sequence[int]) -> None:
        self.at += len(self._decoder.decode(bytes(data)))


class LogprobShapes:
    """Builds both shapes for one request; with `as_ids`, tokens are named by their ids."""

    def __init__(self, names: TokenNames, *, as_ids: bool = False) -> None:
        self._names, self._as_ids = names, as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._names.get(token_id)[0]

    # Chat completions.

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of a choice or of its next part, built when they are written."""
        return {"content": Entries(entries, self.chat_entry), "refusal": None}

    def chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """Return the entry of one token."""
        top = [self._one(*pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.name(token_id), "logprob": finite(logprob), "bytes": self._names.get(token_id)[1]}

    # Completions.

    def completion(self, entries: Sequence[TokenLogprobs | int], offset: Offset) -> dict[str, Any]:
        """Return the `logprobs` of a choice, or of its next part. It begins at `offset`, which is advanced.

        An entry that is only an id is a prompt's first token, which has no probability.
        """
        tokens, offsets, logprobs = [], [], []
        for entry in entries:
            token_id = entry if isinstance(entry, int) else entry.token_id
            tokens.append(self.name(token_id))
            offsets.append(offset.at)
            text, data = self._names.get(token_id)
            offset.add(data or text.encode())
            logprobs.append(None if isinstance(entry, int) else finite(entry.logprob))
        top = Entries(entries, self._by_text)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _by_text(self, entry: TokenLogprobs | int) -> dict[str, float] | None:
        if isinstance(entry, int):
            return None
        logprobs: dict[str, float] = {}
        pairs = (*zip(entry.top_ids, entry.top_logprobs, strict=True), (entry.token_id, entry.logprob))
        for token_id, logprob in pairs:
            logprobs.setdefault(self.name(token_id), finite(logprob))
        return logprobs

    # vLLM's prompt_logprobs.

    def prompt(self, entries: Sequence[TokenLogprobs]) -> Entries:
        """Return an entry for each prompt token: null for the first, then logprob, rank and text by token id."""
        return Entries((None, *entries), self._by_id)

    def _by_id(self, entry: TokenLogprobs | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        ranks = {token: rank + 1 for rank, token in enumerate(entry.top_ids)}
        pairs = dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) | {entry.token_id: entry.logprob}

        def shape(token: int, logprob: float) -> dict[str, Any]:
            text = self._names.get(token)[0]
            return {"logprob": finite(logprob), "rank": ranks.get(token), "decoded_token": text}

        return {str(token): shape(token, logprob) for token, logprob in pairs.items()}
