"""Backends that a `Tokenizer` encodes with: their contract, and the library's tokenizer with the text it was made from.

The library is never asked to write a tokenizer. Version 0.22 and older print a line for a vocabulary with holes in
its ids, hundreds of thousands of characters for a part of a vocabulary, to file descriptor 1 and while no other thread
may run: in a notebook's kernel that descriptor is a pipe, its reader is such a thread, and the kernel hangs
for ever. So a tokenizer is made from the text of a tokenizer.json, which is kept. Facts about its steps come from
the library's parts that have no vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tokenizers

Section = dict[str, Any]
_SETTINGS = (
    "unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix",
    "max_input_chars_per_word",
)  # fmt: skip


class TokenizerSections(NamedTuple):
    """The sections of a tokenizer.json, of the model without its vocabulary; None for a step that a tokenizer lacks."""

    normalizer: Section | None
    pre_tokenizer: Section | None
    post_processor: Section | None
    decoder: Section | None
    model: Section  # its type, and those settings that its kind has

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> TokenizerSections:
        """Return the parts of a tokenizer as the library runs them."""
        model = tokenizer.model
        settings = {name: getattr(model, name) for name in _SETTINGS if hasattr(model, name)}
        if isinstance(model, tokenizers.models.Unigram):
            settings["longest_piece"] = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=0)
        return cls(
            section(tokenizer.normalizer), section(tokenizer.pre_tokenizer), section(tokenizer.post_processor),
            section(tokenizer.decoder), {"type": type(model).__name__, **settings},
        )  # fmt: skip


def section(step: Any) -> Section | None:
    """Return the section of a normalizer, pre-tokenizer, post-processor or decoder; None for None.

    A model must not come here: it would be written with its vocabulary.
    """
    return None if step is None else dict(json.loads(step.__getstate__()))


class TokenSpellings(NamedTuple):
    """The tokens of a vocabulary, for a reader other than the tokenizers library."""

    tokens: list[bytes]  # by their ids, as they stand in texts; empty for an id without a token
    special: list[int]


class TokenizerBackend(Protocol):
    """The contract that a `Tokenizer` encodes and decodes with."""

    def encode(self, text: str, add_special_tokens: bool, *, long: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token(self, token_id: int) -> str | None: ...
    def id_of(self, token: str) -> int | None: ...
    @property
    def size(self) -> int: ...  # number of ids that have a token
    @property
    def longest(self) -> int: ...  # characters of a token
    @property
    def parts(self) -> TokenizerSections: ...
    def added(self) -> dict[int, tokenizers.AddedToken]: ...  # tokens that text may spell out
    def whole(self) -> WholeTokenizer: ...
    def spelled(self) -> TokenSpellings | None: ...


class WholeTokenizer:
    """A backend that is the library's own tokenizer, and the text it was made from."""

    def __init__(self, definition: bytes) -> None:
        """Make a tokenizer from the text of a tokenizer.json. The library raises `Exception`, or panics."""
        self.native: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(definition)
        self._definition: bytes = definition
        self._changed: bool = self.native.padding is not None or self.native.truncation is not None
        self.native.no_padding()
        self.native.no_truncation()
        self.parts: TokenizerSections = TokenizerSections.of(self.native)

    def add(self, tokens: Sequence[tokenizers.AddedToken]) -> None:
        """Add tokens that text may spell out: at once, for each call the library builds its search for all anew."""
        self.native.add_tokens([*tokens])
        self._changed = self._changed or bool(tokens)

    def mark_special(self, tokens: Sequence[str]) -> None:
        """Say that these tokens are special."""
        self.native.add_special_tokens([*tokens])
        self._changed = self._changed or bool(tokens)

    def definition(self) -> bytes:
        """Return the text of a tokenizer.json that makes this tokenizer."""
        if self._changed:
            content = json.loads(self._definition)
            added = [added_section(index, token) for index, token in sorted(self.added().items())]
            content |= {"truncation": None, "padding": None, "added_tokens": added}
            self._definition = json.dumps(content, ensure_ascii=False).encode()
            self._changed = False
        return self._definition

    def encode(self, text: str, add_special_tokens: bool, *, long: bool) -> list[int]:
        return encode(self.native, text, add_special_tokens, long=long)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self.native.decode(ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        return self.native.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        return self.native.token_to_id(token)

    @property
    def size(self) -> int:
        return int(self.native.get_vocab_size(with_added_tokens=True))

    @property
    def longest(self) -> int:
        return max(map(len, self.native.get_vocab(with_added_tokens=True)), default=1)

    def added(self) -> dict[int, tokenizers.AddedToken]:
        return dict(self.native.get_added_tokens_decoder())

    def whole(self) -> WholeTokenizer:
        return self

    def spelled(self) -> TokenSpellings | None:
        return None  # the definition tells


def encode(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool, *, long: bool) -> list[int]:
    """Return the ids of a text. Long texts release the GIL."""
    if not long:
        return list(library.encode(text, add_special_tokens=add_special_tokens).ids)
    (encoding,) = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def added_section(index: int, token: tokenizers.AddedToken) -> Section:
    """Return the entry of a token among the `added_tokens` of a tokenizer.json."""
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": index, **{name: getattr(token, name) for name in names}}
