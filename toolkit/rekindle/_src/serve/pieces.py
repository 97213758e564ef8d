"""JSON in pieces: a large value is serialised piece by piece, so other work runs in between."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel

SLICE_SECONDS = 0.002  # of work; then the loop and other threads run
_MANY = 1_024  # entries of a list serialised at once

_encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":")
).encode  # `json.dumps` would build an encoder each time


def dumps(value: Any) -> str:
    """Return compact JSON."""
    return "null" if value is None else _encode(value)


class Entries:
    """A JSON array. Its entries are built when they are written, by a function of each of `values`."""

    __slots__ = ("make", "values")

    def __init__(self, values: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self.values, self.make = values, make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.values)


def pieces(value: Any) -> Iterator[str]:
    """Yield compact JSON of a value with `Entries` in it, in short pieces."""
    match value:
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
    return isinstance(value, Entries | dict) or (isinstance(value, list | tuple) and len(value) > _MANY)


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
