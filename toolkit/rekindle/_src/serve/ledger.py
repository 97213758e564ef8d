"""The bytes that the requests of a server take: one bound for all of them, and a share for each caller.

`max_queued_tokens` counts what a model computes. A picture of one pixel is one token, and may be a file of megabytes;
a body that never ends is none. So each request has an account of what it holds here: bytes that have arrived, values
that they were parsed to, files of pictures, log-probabilities of its answers. Each is closed as soon as nothing
refers to it any more.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any, Self

import numpy as np

from rekindle._src.core.json_values import BYTES_PER_VALUE
from rekindle._src.core.records import TextDelta, TokenLogprobs
from rekindle._src.serve.errors import ApiError, unavailable

REQUEST_MEMORY = 1 << 30  # bytes, unless a server is given another bound
SHARE = 2  # a caller may hold one part in so many
_UNCOUNTED = 1 << 18  # bytes of results that are not worth a lock
_FLOAT = 32  # bytes, with its place in a tuple
_ALTERNATIVE = 36 + _FLOAT
_SCORES = 650  # of a token's log-probabilities without alternatives, and of the piece of text that they come with
_WITH_ESCAPES = 8  # bytes of a character, while a string with escapes is built
_ASTRAL, _WIDE = 0xF0, 0xC4  # the least first byte, in UTF-8, of characters that take 4 bytes in a str, and 2


class ByteLedger:
    """The bytes that requests hold, by caller. Any thread may use it."""

    def __init__(self, most: int) -> None:
        self.most: int = most
        self.most_of_one: int = max(1, most // SHARE)
        self.held: int = 0
        self._by_caller = Counter[str]()
        self._lock = threading.Lock()

    def account(self, caller: str) -> Account:
        """Return the account of a new request, which holds nothing."""
        return Account(self, caller)

    def held_by(self, caller: str) -> int:
        """Return the bytes of all requests of a caller."""
        return self._by_caller[caller]

    def change(self, caller: str, before: int, after: int) -> None:
        """Count `after` bytes of a request in place of `before`. Raise `ApiError` if they are more and too many."""
        with self._lock:
            held, own = self.held - before + after, self._by_caller[caller] - before + after
            if after > before:
                if after > self.most_of_one:
                    most = f"{_size(self.most_of_one)} are the most of one client (half of --request-memory)"
                    message = f"the request takes {_size(after)} of memory, and {most}. Send less"
                    raise ApiError(413, message, code="body_too_large")
                if own > self.most_of_one:
                    raise unavailable(
                        f"the requests of this client take {_size(own - after + before)} of memory, and "
                        f"{_size(self.most_of_one)} are the most of one (half of --request-memory). Send it again once "
                        "others have ended"
                    )
                if held > self.most:
                    raise unavailable(
                        f"all requests take {_size(held - after + before)} of memory, and {_size(self.most)} are the "
                        "most (--request-memory). Send it again later"
                    )
            self.held = held
            if own:
                self._by_caller[caller] = own
            else:
                self._by_caller.pop(caller, None)


class Account:
    """The bytes that one request holds: `body` as it arrives, `parsed` values, `pictures` as files, and `results`,
    which stay until the client has read them.

    As a context manager, it holds nothing more from the end of its block on.
    """

    def __init__(self, ledger: ByteLedger, caller: str) -> None:
        self._ledger, self._caller, self._closed = ledger, caller, False
        self._lock = threading.Lock()  # threads that read a body or encode prompts hold bytes, too
        self.body = self.parsed = self.pictures = self.results = 0

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return self.body + self.parsed + self.pictures + self.results

    def hold(
        self,
        *,
        body: int | None = None,
        parsed: int | None = None,
        pictures: int | None = None,
        results: int | None = None,
    ) -> None:
        """Replace the bytes of each kind that is given. Raise `ApiError` (413, 503) if they are more and too many.

        After the end of the block this does nothing: a thread may read a body on whose client has left.
        """
        with self._lock:
            self._hold(body, parsed, pictures, results)

    def _hold(self, body: int | None, parsed: int | None, pictures: int | None, results: int | None) -> None:
        if self._closed:
            return
        body = self.body if body is None else body
        parsed = self.parsed if parsed is None else parsed
        pictures = self.pictures if pictures is None else pictures
        results = self.results if results is None else results
        self._ledger.change(self._caller, self.total, body + parsed + pictures + results)
        self.body, self.parsed, self.pictures, self.results = body, parsed, pictures, results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        with self._lock:
            self._hold(0, 0, 0, 0)
            self._closed = True


class Results:
    """Counts the log-probabilities of a request's answers as they arrive, on its account.

    Tokens without them are not counted: they take 0.4 kB each, and a model makes them no faster than it can.
    """

    def __init__(self, account: Account) -> None:
        self._account, self._bytes = account, 0

    def add(self, delta: TextDelta) -> None:
        """Count a delta. Raise `ApiError` once all of them are more than the request may hold."""
        for scores in (delta.logprobs, delta.prompt_logprobs):
            self._bytes += sum(map(_bytes_of_scores, scores))
        if self._bytes >= self._account.results + _UNCOUNTED:
            self._account.hold(results=self._bytes)


def _bytes_of_scores(one: TokenLogprobs) -> int:
    return _SCORES + len(one.top_ids) * _ALTERNATIVE + len(one.of_ids) * _FLOAT + len(one.support)


def parsing_bytes(data: bytes | bytearray, marks: int) -> int:
    """Return the most bytes that parsing a JSON text with so many marks takes: its characters, twice, and its values.

    One character outside of ASCII makes those of its whole string 2 or 4 bytes wide. An escape can stand for one; a
    string with escapes is built in pieces, twice as large as it becomes.
    """
    text = _width(data)
    strings = _WITH_ESCAPES if b"\\u" in data else text
    return len(data) * (text + strings) + marks * BYTES_PER_VALUE


def _width(data: bytes | bytearray) -> int:
    if not data or data.isascii():
        return 1
    largest = int(np.frombuffer(data, np.uint8).max())
    return 4 if largest >= _ASTRAL else 2 if largest >= _WIDE else 1


def bytes_of(value: Any) -> int:
    """Return the bytes of a JSON value with all that is in it."""
    size, values = 0, [value]
    while values:
        one = values.pop()
        size += sys.getsizeof(one)
        if isinstance(one, dict):
            values += one
            values += one.values()
        elif isinstance(one, list):
            values += one
    return size


def _size(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
