"""What stored pages belong to, and the verification of every page that comes from outside this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.kvcache.digest import DIGEST_SIZE, root_digest
from rekindle._src.kvcache.persist.segment import LeafSpec
from rekindle.errors import StoreError

VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What pages belong to. Pages of two identities are equal only if all fields but `model` are."""

    fingerprint: str  # of config and weights
    kv_dtype: str
    page_size: int
    layout: str = ""  # shapes and dtypes of a page's payload
    model: str = ""  # a name for people to read
    version: int = VERSION
    # What a page from outside is compared with; not stored. Empty or 0: not known, and not compared.
    leaves: tuple[LeafSpec, ...] = ()
    vocab_size: int = 0

    @property
    def root(self) -> bytes:
        """The root key of the tree."""
        return root_digest(f"pages {self.version}", self.fingerprint, self.kv_dtype, str(self.page_size), self.layout)

    def fields(self) -> dict[str, Any]:
        """What an index stores of it."""
        return {"identity": {name: getattr(self, name) for name in STORED}}

    @classmethod
    def stored_in(cls, header: Mapping[str, Any]) -> Identity:
        """The identity that an index was written for. Raises StoreError if it names none."""
        found = header.get("identity")
        if not isinstance(found, Mapping) or not all(type(found.get(name)) is kind for name, kind in STORED.items()):
            raise StoreError(f"an index says that it belongs to {found!r}, which is no model")
        return cls(**{name: found[name] for name in STORED})

    def refuses(self, other: Identity) -> str | None:
        """Why pages of `other` can't be used here."""
        for name, what in _REASONS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{what} {theirs!r}, this session has {mine!r}"
        return None


STORED = {"fingerprint": str, "kv_dtype": str, "page_size": int, "layout": str, "model": str, "version": int}
_REASONS = (
    ("version", "it was written in format"),
    ("fingerprint", "it belongs to weights"),
    ("kv_dtype", "its pages hold"),
    ("page_size", "its page size is"),
    ("layout", "its pages are laid out as"),
)


def verify(identity: Identity, records: NDArray[Any], leaves: Sequence[LeafSpec] | None) -> None:
    """Raise StoreError unless records are pages of `identity`: ids within the vocabulary, digests made of the tokens,
    payloads laid out as the session's (None: the index has no payloads).

    That a payload was computed from the tokens can't be verified: whoever may write the file is trusted with that.
    About 2 µs per page.
    """
    if records.dtype["tokens"].shape != (identity.page_size,):
        raise StoreError(f"its pages have {records.dtype['tokens'].shape[0]} tokens, not {identity.page_size}")
    if leaves is not None and identity.leaves and tuple(leaves) != identity.leaves:
        raise StoreError(f"its payloads are laid out as {shown(leaves)}, this session's as {shown(identity.leaves)}")
    if not len(records):
        return
    tokens = records["tokens"]
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (identity.vocab_size and high >= identity.vocab_size):
        most = f" and {identity.vocab_size - 1}" if identity.vocab_size else ""
        raise StoreError(f"it has token {low if low < 0 else high}; ids are between 0{most}")
    named = np.concatenate([records["parent"], np.ascontiguousarray(tokens).view(np.uint8)], axis=1)
    found = b"".join([blake2b(row, digest_size=DIGEST_SIZE).digest() for row in named])  # type: ignore[arg-type]
    if found != records["digest"].tobytes():
        wrong = int((np.frombuffer(found, np.uint8).reshape(-1, DIGEST_SIZE) != records["digest"]).any(1).argmax())
        raise StoreError(f"page {wrong} has a digest that its tokens do not have")


def shown(leaves: Sequence[LeafSpec]) -> str:
    """A layout as an error names it."""
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
