"""The prefix of a prompt, which identifies its cached pages: its tokens, and a namespace that limits sharing.

Everything that decides what a page holds is in one of the two. A change at a single place of the prompt, such as a
picture, is in the name of the token there (`Extension.names`). A change of all its keys and values, such as an
adapter, is a digest of the namespace (`Extension.altered`). The model's own share is in the tree's root.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PageNamespace(NamedTuple):
    """The requests that share pages: they have the same salt, and the same changes to keys and values.

    Its pages follow a root of their own in every prefix tree. A root's digest shows that it is a namespace's, so that
    stored pages can be attached to it, but not which namespace: salts are not stored.
    """

    salt: str | None = None
    altered: tuple[str, ...] = ()  # digests of what changes keys and values, in the order of the capabilities

    def root(self, tree: bytes) -> bytes:
        """Return the digest of its root in the tree with the root `tree`."""
        tag = self._tag()
        return _mark(tree) + tag if tag else tree

    @property
    def key(self) -> int:
        """The lookup key before its first pages, for `previous` of `page_keys`."""
        return int.from_bytes(self._tag(), "little")

    def _tag(self) -> bytes:
        """Return the half of its roots' digests that identifies it; empty for the namespace that all share.

        A salt never has the tag of a change: the hashed text begins with one zero character for a change, and with two
        for a salt that begins with one.
        """
        salt = self.salt
        if self.altered:
            content = f"\0{' '.join(self.altered)}\0{salt or ''}"
        elif salt is None:
            return b""
        else:
            content = f"\0{salt}" if salt.startswith("\0") else salt
        return blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8, person=b"rekindle salt").digest()


SHARED = PageNamespace()  # for requests without a salt or a change


def is_namespace(digest: bytes, tree: bytes) -> bool:
    """True if `digest` is the root of a namespace in this tree, other than the tree's own root."""
    return digest.startswith(_mark(tree))


def key_of(digest: bytes) -> int:
    """Return the `PageNamespace.key` of the namespace that has a root with this digest."""
    return int.from_bytes(digest[8:], "little")


def _mark(tree: bytes) -> bytes:
    return blake2b(tree, digest_size=8, person=b"rekindle salted").digest()


class Prefix(NamedTuple):
    """A prompt, or its beginning, as prefix trees know it."""

    tokens: NDArray[np.int32]  # as they are called there: see `Extension.names`
    namespace: PageNamespace = SHARED

    def first(self, count: int) -> Prefix:
        """Return the prefix of its first `count` tokens."""
        return Prefix(self.tokens[:count], self.namespace)
