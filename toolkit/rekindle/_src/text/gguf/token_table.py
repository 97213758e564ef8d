"""Finds the tokens of a vocabulary that a text contains, by hashes of both, without an object for any token.

The hash of a string is a polynomial in its bytes modulo 2**64, so that one running sum over many strings gives the
hashes of all their parts. A text's part with the hash of a token may be another string: a result may hold
tokens too many, never too few.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.header import Texts

SEPARATOR = b"\xff"  # in no string of UTF-8
Numbers = NDArray[np.uint64]
_SHIFT = np.uint64(64 - 22)  # the prefix table has 4 Mi entries
_BASE, _MODULUS = 0x9E3779B97F4A7C15, 1 << 64
CHUNK = 1 << 13  # strings that are hashed at once: their numbers stay in the cache
_PREFIX_BYTES, _DIGEST = 1 << 19, 16  # of the prefix table, and of the digest of the kept content


@functools.cache
def _values() -> Numbers:
    """Return a number for each byte."""
    mixed = np.arange(1, 257, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(32))


def _powers(base: int, count: int) -> Numbers:
    return _some_powers(base, count.bit_length())[:count]


@functools.lru_cache(maxsize=8)
def _some_powers(base: int, bits: int) -> Numbers:
    powers = np.full(1 << bits, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


class Sums:
    """The running sum over some bytes, which gives the hash of each part of them."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        values = _values()[content]
        values *= _powers(_BASE, len(content))
        self._sums: Numbers = np.zeros(len(content) + 1, np.uint64)
        np.cumsum(values, out=self._sums[1:])
        self._inverse = _powers(pow(_BASE, -1, _MODULUS), len(content) + 1)

    def hashes(self, starts: Any, ends: Any) -> Numbers:
        """Return the hashes of the parts between these places."""
        hashes: Numbers = (self._sums[ends] - self._sums[starts]) * self._inverse[starts]
        return hashes

    def joined(self, starts: Any, places: Any, ends: Any) -> tuple[Numbers, Numbers, Numbers]:
        """Return the hashes of the bytes before and after the one at `places`, and of both without that byte."""
        left, right, lengths = self.hashes(starts, places), self.hashes(places + 1, ends), places - starts
        return left, right, left + _powers(_BASE, int(lengths.max(initial=0)) + 1)[lengths] * right


class TokenTable:
    """The tokens of a vocabulary by their hashes, and the hashes of their beginnings."""

    def __init__(self, texts: Texts, kept: bytes | None = None) -> None:
        """Raise `ValueError` if two different tokens have one hash, if there are no tokens, or if `kept`, the `content`
        of an earlier table, is damaged.
        """
        if not len(texts):
            raise ValueError("a vocabulary without tokens")
        self.texts = texts
        self.longest = int((texts.ends - texts.starts).max(initial=0))
        # Of several tokens with one text the first counts.
        self._prefixes, self._hashes, self._ids = _hashed(texts) if kept is None else _read(kept)
        self.first = np.zeros(len(texts), np.bool_)  # True if no token before it has the same text
        self.first[self._ids] = True

    def content(self) -> bytes:
        """Return the table of these tokens, to be kept."""
        content = self._prefixes.tobytes() + self._hashes.tobytes() + self._ids.tobytes()
        return _digest(content) + content

    def ids(self, hashes: Numbers) -> NDArray[np.int32]:
        """Return the ids of the tokens with these hashes, -1 where there is none."""
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return np.where(self._hashes[at] == hashes, self._ids[at], -1)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; the first one where several have the same text."""
        content = np.frombuffer(token.encode("utf-8", "surrogatepass"), np.uint8)
        (token_id,) = self.ids(Sums(content).hashes(np.array([0]), np.array([len(content)]))).tolist()
        return token_id if token_id >= 0 and self.texts[token_id] == token else None

    def _begin_tokens(self, hashes: Numbers) -> NDArray[np.bool_]:
        """Return an array that is True for the hash of each possible beginning of a token."""
        places = hashes >> _SHIFT
        bits = self._prefixes[places >> np.uint64(3)] >> (places & np.uint64(7)).astype(np.uint8)
        return (bits & np.uint8(1)).astype(np.bool_)

    def inside(self, content: bytes, prefix: bytes = b"") -> set[int]:
        """Return the tokens that are parts of `content`, or `prefix` followed by a part of `content`."""
        octets = np.frombuffer(content, np.uint8)
        sums, matches = Sums(octets), [np.empty(0, np.uint64)]
        for start in {b"", prefix}:
            head = Sums(np.frombuffer(start, np.uint8)).hashes(np.array([0]), np.array([len(start)]))
            factor = np.uint64(pow(_BASE, len(start), _MODULUS))
            at = np.arange(len(octets))
            for length in range(0 if start else 1, self.longest - len(start) + 1):
                at = at[: np.searchsorted(at, len(octets) - length, side="right")]
                hashes = sums.hashes(at, at + length) * factor + head
                possible = self._begin_tokens(hashes)
                at, hashes = at[possible], hashes[possible]
                if not len(at):
                    break
                matches.append(hashes)
        ids = self.ids(np.concatenate(matches))
        return set(ids[ids >= 0].tolist())


def _hashed(texts: Texts) -> tuple[NDArray[np.uint8], Numbers, NDArray[np.int32]]:
    """Return the bits of beginnings of tokens, and the tokens' hashes, ascending, with their ids."""
    lengths = texts.ends - texts.starts
    prefixes = np.zeros(8 * _PREFIX_BYTES, np.bool_)
    hashes = np.empty(len(texts), np.uint64)
    octets = np.frombuffer(texts.content, np.uint8)
    for at in range(0, len(texts), CHUNK):
        starts, ends = texts.starts[at : at + CHUNK], texts.ends[at : at + CHUNK]
        first = int(starts[0])
        sums, starts, ends = Sums(octets[first : int(ends[-1])]), starts - first, ends - first
        hashes[at : at + len(starts)] = sums.hashes(starts, ends)
        sizes = lengths[at : at + len(starts)]
        begins = np.repeat(starts, sizes)
        places = np.arange(len(begins)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + begins + 1
        prefixes[sums.hashes(begins, places) >> _SHIFT] = True
    order = np.argsort(hashes)
    sorted_hashes = hashes[order]
    repeated = np.append(False, sorted_hashes[1:] == sorted_hashes[:-1])
    for at in np.flatnonzero(repeated).tolist():
        if texts[int(order[at])] != texts[int(order[at - 1])]:
            raise ValueError("two tokens have one hash")
    ids = np.minimum.reduceat(order, np.flatnonzero(~repeated)).astype(np.int32)
    return np.packbits(prefixes, bitorder="little"), sorted_hashes[~repeated], ids


def _read(kept: bytes) -> tuple[NDArray[np.uint8], Numbers, NDArray[np.int32]]:
    """Return the same from the content of a table."""
    content = memoryview(kept)[_DIGEST:]
    count = (len(content) - _PREFIX_BYTES) // 12
    if kept[:_DIGEST] != _digest(content):
        raise ValueError("a damaged table of tokens")
    end = _PREFIX_BYTES + 8 * count
    return (
        np.frombuffer(content[:_PREFIX_BYTES], np.uint8),
        np.frombuffer(content[_PREFIX_BYTES:end], np.uint64),
        np.frombuffer(content[end:], np.int32),
    )


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()
