"""Read the header of a shared library of Linux's: its segments, its dynamic entries and its symbols.

Read as the System V ABI and the `elf(5)` manual page describe it: 64 bits, the lowest byte first.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

AARCH64, X86_64, LIBRARY = 183, 62, 3
EXECUTE, WRITE = 1, 2  # rights of segments
_DYNAMIC, _SYMBOLS = 6, 11  # kinds of sections
_NEEDED, _TEXT_RELOCATIONS, _FLAGS = 1, 22, 30  # of dynamic entries
_HAS_TEXT_RELOCATIONS = 4  # in the flags
_LOADED, _STACK = 1, 0x6474E551  # kinds of segments


@dataclass
class Elf:
    """A library's facts."""

    machine: int
    kind: int
    segments: list[int] = field(default_factory=list)  # rights of what is loaded
    stack: int = EXECUTE | WRITE  # rights; these where the library is silent
    needs: list[str] = field(default_factory=list)  # other libraries
    text_relocations: bool = False
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    glibc: tuple[int, int] = (0, 0)  # the newest version that it asks for


def read(path: Path) -> Elf:
    """Read the facts of a library. Raises ValueError for any other file."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no ELF file of 64 bits")
    kind, machine = struct.unpack_from("<2H", data, 16)
    programs, sections = struct.unpack_from("<2Q", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", data, 54)
    found = Elf(machine, kind)
    for index in range(program_count):
        segment, rights = struct.unpack_from("<2I", data, programs + program_size * index)
        if segment == _LOADED:
            found.segments.append(rights)
        elif segment == _STACK:
            found.stack = rights
    headers = [struct.unpack_from("<2I4Q2I2Q", data, sections + section_size * at) for at in range(section_count)]
    for _, section, _, _, start, size, link, _, _, _ in headers:
        if section in (_DYNAMIC, _SYMBOLS):
            first, length = headers[link][4:6]
            names, content = data[first : first + length], data[start : start + size]
            (_dynamic if section == _DYNAMIC else _symbols)(found, content, names)
            versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", names)
            found.glibc = max([found.glibc, *((int(major), int(minor)) for major, minor in versions)])
    return found


def _text(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode()


def _dynamic(found: Elf, content: bytes, names: bytes) -> None:
    for tag, value in struct.iter_unpack("<2Q", content):
        if tag == _NEEDED:
            found.needs.append(_text(names, value))
        elif tag == _TEXT_RELOCATIONS or (tag == _FLAGS and value & _HAS_TEXT_RELOCATIONS):
            found.text_relocations = True


def _symbols(found: Elf, content: bytes, names: bytes) -> None:
    for name, _, _, section, _, _ in struct.iter_unpack("<I2BH2Q", content):
        if name:
            (found.defined if section else found.undefined).add(_text(names, name))
