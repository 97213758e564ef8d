"""The prefix of a prompt, by which its cached pages are known: its tokens, and the namespace in which they are shared.

Everything that decides what a page holds is in one of the two. What stands for a single place of the prompt, such as a
picture, is in the name of the token there (`Extension.names`). What changes all of its keys and values, such as an
adapter, is a digest of the namespace (`Extension.altered`). What the model itself decides is in the tree's root.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PageNamespace(NamedTuple):
    """The requests that share pages: those with the same salt, and the same changes to keys and values.

    Its pages follow a root of their own in every prefix tree. A root's digest tells that it is a namespace's, so that
    stored pages can be attached to it, and not of which: salts are not stored.
    """

    salt: str | None = None
    altered: tuple[str, ...] = ()  # digests of what changes keys and values, in the order of the capabilities

    def root(self, tree: bytes) -> bytes:
        """Return the digest of its root, in the tree whose own root is `tree`."""
        tag = self._tag()
        return _mark(tree) + tag if tag else tree

    @property
    def key(self) -> int:
        """The lookup key before its first pages, for `previous` of `page_keys`."""
        return int.from_bytes(self._tag(), "little")

    def _tag(self) -> bytes:
        """Return the half of its roots' digests that stands for it; nothing for the namespace that all share.

        A salt never has the tag of a change: what is hashed begins with one zero character for a change, and with two
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


SHARED = PageNamespace()  # that of requests without a salt or a change


def is_namespace(digest: bytes, tree: bytes) -> bool:
    """True if `digest` is that of a namespace's root in this tree, other than the tree's own."""
    return digest.startswith(_mark(tree))


def key_of(digest: bytes) -> int:
    """Return the `PageNamespace.key` of the namespace whose root has this digest."""
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
