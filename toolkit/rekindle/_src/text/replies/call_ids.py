"""Ids of calls: unique for each call, and the same again when a request is repeated with its seed."""

from __future__ import annotations

import hashlib
import secrets
import string
from collections.abc import Callable

_LETTERS = string.ascii_letters + string.digits


def call_ids(seed: bytes | None, length: int = 0) -> Callable[[int], str]:
    """Return a function from a call's index to its id, such as `call_Zk3…`, or of `length` letters and digits.

    `seed` is a digest of all that decides the reply: prompt, seed and the index of the sequence. None draws one.
    """
    key = secrets.token_bytes(16) if seed is None else seed

    def new(index: int) -> str:
        number = int.from_bytes(hashlib.blake2b(key + index.to_bytes(8, "little"), digest_size=32).digest(), "little")
        letters = []
        for _ in range(length or 24):
            number, letter = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[letter])
        return ("" if length else "call_") + "".join(letters)

    return new
