"""JSON bodies, in and out.

A request's body is bounded in size and time, and free of strings that are not Unicode text. An answer is serialised in
pieces, so that other work runs in between.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from rekindle._src.core.json_values import count_values
from rekindle._src.serve.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
IN_A_THREAD = 128 << 10  # bytes from which parsing delays other streams by a millisecond or more
VALUES_IN_A_THREAD = 4_096  # values from which making a request of them may do so, however few bytes they have
BYTES_PER_VALUE = 32  # a body may have one value for so many bytes of the largest body
VALUES_PER_NAME = 8  # a body may have one field name for so many values: a name takes ten times as long to parse
MOST_DIGITS = 1_000  # of a number
_BLOCK = 1 << 20

SLICE_SECONDS = 0.002  # of work; then the loop and other threads run
_MANY = 1_024  # entries of a list serialised at once
_encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":")
).encode  # `json.dumps` would build an encoder each time


class ClientDisconnect(Exception):
    """The client disconnected before it had sent its whole request."""


def header(scope: MutableMapping[str, Any], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_body(
    scope: Scope, receive: Receive, *, limit: int, seconds: float, hold: Callable[[int], object]
) -> bytearray:
    """Return the body of a JSON request. Raise `ApiError` (408, 413, 415) for others.

    `hold` is called with the bytes that it takes in memory so far, and may raise. Raise `ClientDisconnect` if the
    client disconnects before it has sent the whole body.
    """
    kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the content type is {kind[:80] or 'missing'!r}. Send Content-Type: application/json")
    announced = header(scope, b"content-length") or ""
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise too_large(limit)
    data = bytearray()
    try:
        with anyio.fail_after(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                data += message.get("body", b"")
                if len(data) > limit:
                    raise too_large(limit)
                hold(sys.getsizeof(data))
                if not message.get("more_body", False):
                    return data
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:.0f} s. Send it again", code="timeout") from None


def too_large(limit: int, what: str = "body") -> ApiError:
    """Return the error for a body of more than `limit` bytes."""
    return ApiError(413, f"the {what} has more than {limit / 2**20:.0f} MiB. Send less", code="body_too_large")


def check_size(data: bytes | bytearray, limit: int) -> int:
    """Return about how many values JSON has. Raise `ApiError` (413) for more values or names than a body may have.

    `limit` is the most bytes of a body.
    """
    most = max(IN_A_THREAD, limit // BYTES_PER_VALUE)
    return check_values(data, most, most // VALUES_PER_NAME)


def check_values(data: bytes | bytearray, most: int, most_names: int) -> int:
    """Return the number of values of JSON, or more. Raise `ApiError` (413) for more than `most`, or `most_names` names.

    A parsed value takes some 100 bytes, and a name takes a microsecond to parse.
    """
    counts = count_values(data, most, most_names)
    if counts.values > most:
        raise ApiError(413, f"the body has more than {most:,} JSON values. Send less", code="body_too_large")
    if counts.names > most_names:
        raise ApiError(413, f"the body has more than {most_names:,} named fields. Send less", code="body_too_large")
    return counts.values


def parse(data: bytes | bytearray) -> Any:
    """Return the JSON value. Raise `ApiError` if the data is not JSON, or a string is not Unicode text."""
    value = load(data)
    if b"\\ud" in data or b"\\uD" in data:
        check_text(value)
    return value


def load(data: bytes | bytearray) -> Any:
    """Parse JSON; strings may contain lone surrogates. Raise `ApiError` for invalid JSON."""
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_constant, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply. Flatten it") from None
    except ValueError as error:
        raise ApiError(400, f"the body can't be read as JSON: {str(error)[:200]}. Check it") from None


def check_text(value: Any) -> None:
    """Raise `ApiError` for half a surrogate pair: it has no UTF-8 form, and no tokenizer accepts it."""
    values = [value]  # looked at one by one: writing them as one text would hold the interpreter's lock
    try:
        while values:
            one = values.pop()
            if isinstance(one, str):
                for start in range(0, len(one), _BLOCK):
                    one[start : start + _BLOCK].encode()
            elif isinstance(one, dict):
                values += one
                values += one.values()
            elif isinstance(one, list):
                values += one
    except UnicodeEncodeError:
        raise ApiError(400, "the body has a string with half a surrogate pair. Send Unicode text") from None


def _whole(text: str) -> int:
    _check_digits(text)
    return int(text)


def _check_digits(text: str) -> None:
    if len(text) > MOST_DIGITS:  # the time to read a whole number grows with the square of their number
        raise ValueError(f"a number of {len(text):,} characters, and at most {MOST_DIGITS:,} are read")


def _finite(text: str) -> float:
    _check_digits(text)
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def dumps(value: Any) -> str:
    return "null" if value is None else _encode(value)


class Entries:
    """A JSON array. Its entries are built when they are written, by a function of each of `values`."""

    __slots__ = ("make", "values")

    def __init__(self, values: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self.values, self.make = values, make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.values)


class Column:
    """A long JSON array of plain values, which `make` builds when they are written, some of `values` at a time."""

    __slots__ = ("make", "values")

    def __init__(self, values: Any, make: Callable[[Any], list[Any]]) -> None:
        self.values, self.make = values, make

    def __iter__(self) -> Iterator[list[Any]]:
        return (self.make(self.values[start : start + _MANY]) for start in range(0, len(self.values), _MANY))


def pieces(value: Any) -> Iterator[str]:
    """Yield compact JSON of a value with `Entries` or a `Column` in it, in short pieces."""
    match value:
        case Column():
            yield "["
            for index, part in enumerate(value):
                yield ("," if index else "") + dumps(part)[1:-1]
            yield "]"
        case Entries():
            yield "["
            for index, entry in enumerate(value):
                if index:
                    yield ","
                yield from pieces(entry)
            yield "]"
        case dict() if any(map(_is_large, value.values())):
            mark = "{"
            for name, entry in value.items():
                yield f"{mark}{dumps(name)}:"
                yield from pieces(entry)
                mark = ","
            yield "}"
        case list() | tuple() if len(value) > _MANY:
            yield "["
            for start in range(0, len(value), _MANY):
                yield ("," if start else "") + dumps(value[start : start + _MANY])[1:-1]
            yield "]"
        case _:
            yield dumps(value)


def _is_large(value: Any) -> bool:
    return isinstance(value, Entries | Column | dict) or (isinstance(value, list | tuple) and len(value) > _MANY)


async def paced(parts: Iterator[str]) -> AsyncIterator[str]:
    """Yield the parts, and let the loop run after each 2 ms of building them."""
    began = time.perf_counter()
    for part in parts:
        yield part
        if time.perf_counter() - began > SLICE_SECONDS:
            await anyio.lowlevel.checkpoint()
            began = time.perf_counter()


async def text_of(value: Any) -> str:
    """Return compact JSON of a value that may be large."""
    return "".join([part async for part in paced(pieces(value))])
