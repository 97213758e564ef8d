"""JSON in pieces: the text of a large value is made bit by bit, so that other work goes on in between."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel

SLICE_SECONDS = 0.002  # at a time; then the loop turns, and other threads have the interpreter
_MANY = 1_024  # entries of a list that are written at once

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # `json.dumps` would make one each time


def dumps(value: Any) -> str:
    """Compact JSON."""
    return "null" if value is None else _encode(value)


class Entries:
    """An array of JSON whose entries are made when they are written, by a function of each of `values`."""

    __slots__ = ("make", "values")

    def __init__(self, values: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self.values, self.make = values, make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.values)


def pieces(value: Any) -> Iterator[str]:
    """Compact JSON of a value with `Entries` in it, in short pieces."""
    match value:
        case Entries():
            yield "["
            for index, one in enumerate(value):
                if index:
                    yield ","
                yield from pieces(one)
            yield "]"
        case dict() if any(map(_is_large, value.values())):
            mark = "{"
            for name, one in value.items():
                yield f"{mark}{dumps(name)}:"
                yield from pieces(one)
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
    """The same parts; the loop turns whenever making them has taken a while."""
    began = time.perf_counter()
    for part in parts:
        yield part
        if time.perf_counter() - began > SLICE_SECONDS:
            await anyio.lowlevel.checkpoint()
            began = time.perf_counter()


async def text_of(value: Any) -> str:
    """Compact JSON of a value that may be large."""
    return "".join([part async for part in paced(pieces(value))])
