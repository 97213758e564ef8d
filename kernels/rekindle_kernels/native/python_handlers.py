"""Handlers written in Python that XLA calls: how they read a call frame, and answer what XLA asks first.

What every session needs at its start is not left to a compiler. Such a handler takes the GIL, so it does little.
"""

from __future__ import annotations

import ctypes
from typing import Any

from rekindle_kernels.native.layout import WORD, Layout
from rekindle_kernels.native.xla_abi import API_VERSION, BUFFER, CALL_FRAME, EXTENSION, METADATA, METADATA_KIND

HANDLER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def read(layout: Layout, address: int, name: str) -> int:
    """Return a field of the record at `address`."""
    offset, kind = layout.fields[name]
    number = ctypes.c_int32 if kind == "int32" else ctypes.c_int64
    return number.from_address(address + offset).value


def asks_version(frame: int) -> bool:
    """True if XLA only asks for the version of its interface that this was written for; then it is answered."""
    extension = read(CALL_FRAME, frame, "extension")
    while extension:
        if read(EXTENSION, extension, "kind") == METADATA_KIND:
            answer = read(EXTENSION, extension, "metadata") + METADATA.offset("major")
            (ctypes.c_int32 * 3).from_address(answer)[:] = list(API_VERSION)
            return True
        extension = read(EXTENSION, extension, "next")
    return False


def buffer(frame: int, side: str, index: int) -> int:
    """Return the address of the record of an operand or result; `side` is "operands" or "results"."""
    return ctypes.c_int64.from_address(read(CALL_FRAME, frame, side) + WORD * index).value


def data(frame: int, side: str, index: int) -> int:
    """Return the address of the data of an operand or result."""
    return read(BUFFER, buffer(frame, side, index), "data")


def address_of(handler: Any) -> int:
    """Return the address of a handler."""
    pointer = ctypes.cast(handler, ctypes.c_void_p).value
    assert pointer is not None, "a callback without an address"
    return pointer
