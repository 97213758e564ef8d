"""Reading the JSON body of a request: bounded in size and time, and free of what JSON allows but text is not."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import numpy as np

from rekindle._src.serve.errors import Refused

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
IN_A_THREAD = 128 << 10  # bytes from which on parsing would hold up other streams by a millisecond or more
BYTES_PER_VALUE = 32  # of the largest body: so many times fewer values it may have
VALUES_PER_NAME = 8  # so many times fewer names of fields than values: each takes ten times as long to parse
_BLOCK = 1 << 20
_MARKS = (b",", b":", b"[", b"{")  # each stands before a value, or behind one


class Disconnected(Exception):
    """The client went away before it had sent its whole request."""


def header(scope: MutableMapping[str, Any], name: bytes) -> str | None:
    """The value of a request header, or None."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, *, limit: int, seconds: float) -> bytearray:
    """The body of a request that says it is JSON. Raises `Refused` (408, 413, 415).

    Raises `Disconnected` if the client goes away before all of it was sent.
    """
    kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refused(415, f"the content type is {kind[:80] or 'missing'!r}. Send Content-Type: application/json")
    announced = header(scope, b"content-length") or ""
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(limit)
    data = bytearray()
    try:
        with anyio.fail_after(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                data += message.get("body", b"")
                if len(data) > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return data
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {seconds:.0f} s. Send it again", code="timeout") from None


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body has more than {limit / 2**20:.0f} MiB. Send less", code="body_too_large")


def check_values(data: bytes | bytearray, most: int, most_names: int) -> None:
    """Raise `Refused` (413) for JSON of more than `most` values, or more than `most_names` named fields.

    A value takes some 100 bytes once it is parsed, and a name a microsecond.

    Python's parser holds the interpreter's lock throughout; here NumPy counts, which gives it up.
    """
    if sum(data.count(mark) for mark in _MARKS) <= most and data.count(b":") <= most_names:
        return
    count, names, inside, escaped = 0, 0, 0, False
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        quotes = block == ord('"')
        slashes = block == ord("\\")
        if escaped or slashes.any():
            at = np.arange(len(block))
            other = np.maximum.accumulate(np.where(slashes, -1 - escaped, at))  # the last that is no backslash
            odd = ((at - other) & 1).astype(bool)  # an odd number of backslashes ends here
            quotes[1:] &= ~odd[:-1]
            quotes[0] &= not escaped
            escaped = bool(odd[-1])
        within = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ np.uint8(inside)
        inside = int(within[-1])
        outside = within == 0
        count += int(np.count_nonzero(np.isin(block, np.frombuffer(b"".join(_MARKS), np.uint8)) & outside))
        names += int(np.count_nonzero((block == ord(":")) & outside))
        if count > most:
            raise Refused(413, f"the body has more than {most:,} JSON values. Send less", code="body_too_large")
        if names > most_names:
            raise Refused(413, f"the body has more than {most_names:,} named fields. Send less", code="body_too_large")


def parse(data: bytes | bytearray) -> Any:
    """The JSON value; raises `Refused` for what is none, and for strings that are no Unicode text."""
    try:
        text = data.decode("utf-8-sig")
        found = json.loads(text, parse_constant=_constant, parse_float=_finite)
        if "\\ud" in text or "\\uD" in text:  # half a surrogate pair has no UTF-8, and no tokenizer takes it
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise Refused(400, "the body is nested too deeply. Flatten it") from None
    except UnicodeEncodeError:
        raise Refused(400, "the body has a string with half a surrogate pair. Send Unicode text") from None
    except ValueError as error:
        raise Refused(400, f"the body can't be read as JSON: {str(error)[:200]}. Check it") from None
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
