"""The identity that stored pages belong to, and the verification of every page from outside this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.prompt_rows import UNNAMED
from rekindle._src.kvcache.digest import DIGEST_SIZE, root_digest
from rekindle._src.kvcache.persist.segment import LeafSpec
from rekindle.errors import StoreError

VERSION = 1
_SHOWN = 200  # characters of what an index says


def mark(what: str) -> str:
    """Return the mark that follows a pages' layout and names data stored with pages, such as captures."""
    assert what.isalpha(), f"{what!r} is not a word"
    return f", {what} of "


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """The model, options and layout of pages. Pages of two identities are equal only if all fields but `model` are."""

    fingerprint: str  # of config and weights
    kv_dtype: str
    page_size: int
    layout: str = ""  # shapes and dtypes of a page's payload
    model: str = ""  # a name for people to read
    version: int = VERSION
    # Compared with pages from outside; not stored. Not compared while empty or 0, which means unknown.
    leaves: tuple[LeafSpec, ...] = ()
    vocab_size: int = 0

    @property
    def beside_pages(self) -> bool:
        """True if this identifies data stored with pages; see `mark`."""
        parts = (part.partition(" of ") for part in self.layout.split(", ")[1:])
        return any(of and what.isalpha() for what, of, _ in parts)

    @property
    def root(self) -> bytes:
        """The root key of the tree."""
        return root_digest(f"pages {self.version}", self.fingerprint, self.kv_dtype, str(self.page_size), self.layout)

    def fields(self) -> dict[str, object]:
        """Return the fields that an index stores."""
        return {"identity": {name: getattr(self, name) for name in STORED}}

    @classmethod
    def stored_in(cls, header: Mapping[str, object]) -> Identity:
        """Return the identity of an index. Raises StoreError if it has none."""
        fields = header.get("identity")
        if not isinstance(fields, Mapping) or not all(type(fields.get(name)) is kind for name, kind in STORED.items()):
            raise StoreError(f"an index says that it belongs to {fields!r}, which is no model")
        return cls(**{name: fields[name] for name in STORED})

    def mismatch(self, other: Identity) -> str | None:
        """Return why pages of `other` can't be used here; None if they can."""
        for name, reason in _REASONS:
            expected, actual = getattr(self, name), getattr(other, name)
            if expected != actual and name == "fingerprint":
                return f"{reason} {_weights(actual, other.model)}, this session has {_weights(expected, self.model)}"
            if expected != actual:
                return f"{reason} {words.shorten(repr(actual), _SHOWN)}, this session has {expected!r}"
        return None


STORED = {"fingerprint": str, "kv_dtype": str, "page_size": int, "layout": str, "model": str, "version": int}
_REASONS = (
    ("version", "it was written in format"),
    ("fingerprint", "it belongs to weights"),
    ("kv_dtype", "its pages hold"),
    ("page_size", "its page size is"),
    ("layout", "its pages are laid out as"),
)


def _weights(fingerprint: str, model: str) -> str:
    """Return how weights are called in an error: their digest and, where it is known, the model's name."""
    return words.shorten(repr(fingerprint), _SHOWN) + (f" of {words.shorten(repr(model), _SHOWN)}" if model else "")


def verify(identity: Identity, records: NDArray[Any], leaves: Sequence[LeafSpec] | None) -> None:
    """Raise StoreError unless records are pages of `identity`: ids within the vocabulary, digests made of the tokens,
    payloads laid out as the session's (None: the index has no payloads).

    That a payload was computed from the tokens can't be verified: those who may write the file are trusted with that.
    About 2 µs per page.
    """
    if records.dtype["tokens"].shape != (identity.page_size,):
        raise StoreError(f"its pages have {records.dtype['tokens'].shape[0]} tokens, not {identity.page_size}")
    if leaves is not None and identity.leaves and tuple(leaves) != identity.leaves:
        raise StoreError(f"its payloads are laid out as {shown(leaves)}, this session's as {shown(identity.leaves)}")
    if not len(records):
        return
    tokens = records["tokens"]
    high, unnamed = int(tokens.max()), bool((tokens == UNNAMED).any())  # those below are names of pages with pictures
    if unnamed or (identity.vocab_size and high >= identity.vocab_size):
        upper = f" and {identity.vocab_size - 1}" if identity.vocab_size else ""
        raise StoreError(f"it has token {UNNAMED if unnamed else high}; ids are between 0{upper}")
    content = np.concatenate([records["parent"], np.ascontiguousarray(tokens).view(np.uint8)], axis=1)
    digests = b"".join([blake2b(row, digest_size=DIGEST_SIZE).digest() for row in content])  # type: ignore[arg-type]
    if digests != records["digest"].tobytes():
        wrong = int((np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_SIZE) != records["digest"]).any(1).argmax())
        raise StoreError(f"page {wrong} has a digest that its tokens do not have")


def shown(leaves: Sequence[LeafSpec]) -> str:
    """Format a layout for error messages."""
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
