"""Read the header of a DLL for Windows: its sections, and the functions that it exports and imports.

Read as Microsoft's "PE Format" describes it: PE32+, the lowest byte first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

X86_64 = 0x8664
EXECUTE, WRITE = 0x20000000, 0x80000000  # rights of sections
_PE32_PLUS, _LIBRARY, _RELOCATIONS_STRIPPED, _MAY_MOVE = 0x20B, 0x2000, 0x1, 0x40
_DIRECTORIES, _EXPORTS, _IMPORTS = 112, 0, 1  # in the optional header; of the directories


@dataclass
class PortableExecutable:
    """A library's facts."""

    machine: int
    is_library: bool
    may_move: bool  # to any address
    name: str = ""
    sections: dict[str, int] = field(default_factory=dict)  # rights, by name
    exports: set[str] = field(default_factory=set)
    imports: dict[str, set[str]] = field(default_factory=dict)  # functions, by library


def read(path: Path) -> PortableExecutable:
    """Read the facts of a library. Raises ValueError for any other file."""
    data = path.read_bytes()
    (start,) = struct.unpack_from("<I", data, 60)
    if data[:2] != b"MZ" or data[start : start + 4] != b"PE\0\0":
        raise ValueError(f"{path} is not a Windows executable or DLL (PE32+)")
    machine, count, _, _, _, size, flags = struct.unpack_from("<2H3I2H", data, start + 4)
    optional = start + 24
    magic, may = struct.unpack_from("<H68xH", data, optional)
    if magic != _PE32_PLUS:
        raise ValueError(f"{path} is none of 64 bits")
    moves = bool(may & _MAY_MOVE) and not flags & _RELOCATIONS_STRIPPED
    found = PortableExecutable(machine, bool(flags & _LIBRARY), moves)
    places = []
    for index in range(count):
        name, _, first, length, at, rights = struct.unpack_from("<8s4I12xI", data, optional + size + 40 * index)
        found.sections[name.rstrip(b"\0").decode()] = rights
        places.append((first, length, at))

    def offset(address: int) -> int:
        return next(address - first + at for first, length, at in places if first <= address < first + length)

    def text(address: int) -> str:
        begin = offset(address)
        return data[begin : data.index(b"\0", begin)].decode()

    exports, imports = (
        struct.unpack_from("<I", data, optional + _DIRECTORIES + 8 * index)[0] for index in (_EXPORTS, _IMPORTS)
    )
    if exports:
        name, names, table = struct.unpack_from("<12xI8xI4xI", data, offset(exports))
        found.name = text(name)
        found.exports = {text(address) for address in struct.unpack_from(f"<{names}I", data, offset(table))}
    at = offset(imports) if imports else 0
    while at and any(data[at : at + 20]):
        lookup, name = struct.unpack_from("<I8xI", data, at)
        entries, functions = offset(lookup), set[str]()
        while (address := struct.unpack_from("<Q", data, entries)[0]) != 0:
            functions.add(text(address + 2))  # after a hint of two bytes
            entries += 8
        found.imports[text(name)] = functions
        at += 20
    return found
