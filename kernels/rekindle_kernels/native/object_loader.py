"""Loads the object code of native kernels without LLVM, a library of 46 MiB by itself.

Kernels are compiled so that they may lie anywhere: what is left to fill in are absolute addresses, of their own
sections and of a few functions of the C library. That is done here for ELF on x86-64. Other object code, and anything
that is not known here, is LLVM's to load.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct
import sys
from collections import namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle_kernels import system

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_ADDRESS = struct.Struct("<Q")
_IDENTITY = b"\x7fELF\x02\x01\x01"  # 64 bits, the lowest byte first
_OBJECT, _X86_64 = 1, 62
_DATA, _SYMBOLS, _RELOCATIONS, _SHORT_RELOCATIONS = 1, 2, 4, 9  # types of sections
_WRITABLE, _IN_MEMORY = 1, 2
_ABSOLUTE_64 = 1
_ELSEWHERE, _SPECIAL = 0, 0xFF00  # sections of a symbol
_loaded: list[memoryview] = []  # for good: XLA may call the code until the process ends


class _UnknownObject(Exception):
    """There is something that this does not know."""


_Section = namedtuple("_Section", "name kind flags address offset size link info alignment entry_size")
_Symbol = namedtuple("_Symbol", "name info other section value size")


def load(code: bytes, symbol: str, known: Mapping[str, int]) -> int | None:
    """Return the address of a symbol of object code, which stays in memory; None where LLVM has to load it.

    `known` are addresses of symbols that are neither in the code nor in the C library.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    with contextlib.suppress(_UnknownObject, struct.error, IndexError, OSError, ValueError):
        return _load(code, symbol, known)
    return None


def _load(code: bytes, symbol: str, known: Mapping[str, int]) -> int:
    sections = _sections(code)
    places, size = _places(sections)
    memory = system.code_memory(size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for index, place in places.items():
        section = sections[index]
        memory[place : place + section.size] = code[section.offset : section.offset + section.size]
    table = next((index for index, section in enumerate(sections) if section.kind == _SYMBOLS), None)
    if table is None:
        raise _UnknownObject("no symbols")
    symbols = [_Symbol(*fields) for fields in _SYMBOL.iter_unpack(_bytes(code, sections[table]))]
    names = _bytes(code, sections[sections[table].link])

    def address(found: _Symbol) -> int:
        if found.section == _ELSEWHERE:
            return _outside(_text(names, found.name), known)
        if found.section >= _SPECIAL or found.section not in places:
            raise _UnknownObject(f"a symbol of section {found.section}")
        return base + places[found.section] + found.value

    for index, (offset, info, addend) in _relocations(code, sections, table):
        if index not in places:
            continue  # what only debuggers read
        if info & 0xFFFFFFFF != _ABSOLUTE_64 or offset + _ADDRESS.size > sections[index].size:
            raise _UnknownObject(f"relocation {info:x} of section {index}")
        value = address(symbols[info >> 32]) + addend
        _ADDRESS.pack_into(memory, places[index] + offset, value & (1 << 64) - 1)
    entry = next((found for found in symbols if _text(names, found.name) == symbol), None)
    if entry is None:
        raise _UnknownObject(f"no {symbol}")
    found = address(entry)
    system.make_executable(memory)
    _loaded.append(memory)
    return found


def _sections(code: bytes) -> list[_Section]:
    identity, kind, machine, *_, start, _, _, _, _, size, count, _ = _HEADER.unpack_from(code)
    if not identity.startswith(_IDENTITY) or (kind, machine, size) != (_OBJECT, _X86_64, _SECTION.size):
        raise _UnknownObject("another format")
    return [_Section(*_SECTION.unpack_from(code, start + number * size)) for number in range(count)]


def _places(sections: list[_Section]) -> tuple[dict[int, int], int]:
    """Return where in memory each section goes that has to be there, by its number, and how much memory that takes."""
    places, end = dict[int, int](), 0
    for index, section in enumerate(sections):
        if not section.flags & _IN_MEMORY or section.size == 0:
            continue
        if section.kind != _DATA or section.flags & _WRITABLE or section.alignment > mmap.PAGESIZE:
            raise _UnknownObject(f"section {index}")
        step = max(1, section.alignment)
        places[index] = (end + step - 1) // step * step
        end = places[index] + section.size
    return places, end


def _relocations(code: bytes, sections: list[_Section], symbols: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """The number of a section, and offset, kind and addend of an address that has to be filled in there."""
    for section in sections:
        if section.kind not in (_RELOCATIONS, _SHORT_RELOCATIONS):
            continue
        if section.kind != _RELOCATIONS or section.link != symbols:
            raise _UnknownObject(f"relocations of type {section.kind}")
        for fields in _RELOCATION.iter_unpack(_bytes(code, section)):
            yield section.info, fields


def _bytes(code: bytes, section: _Section) -> bytes:
    return code[section.offset : section.offset + section.size]


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()


def _outside(name: str, known: Mapping[str, int]) -> int:
    if name in known:
        return known[name]
    function: Any = getattr(ctypes.CDLL(None), name, None)
    found = None if function is None else ctypes.cast(function, ctypes.c_void_p).value
    if not found:
        raise _UnknownObject(f"no {name} in the C library")
    return found
