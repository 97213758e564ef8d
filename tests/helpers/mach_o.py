"""Read the header of a Mach-O library: its load commands, its exported and undefined symbols, and its signature.

Read as Apple's `mach-o/loader.h` and `kern/cs_blobs.h` describe it: 64 bits, the lowest byte first.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from pathlib import Path

MAGIC, LIBRARY, ARM64, X86_64 = 0xFEEDFACF, 6, 0x0100000C, 0x01000007
WRITE, EXECUTE = 2, 4
_SEGMENT, _SYMBOLS, _NEEDS, _IDENTITY, _SIGNATURE, _BUILD = 0x19, 0x2, 0xC, 0xD, 0x1D, 0x32
_EXTERNAL, _TYPE, _UNDEFINED = 0x01, 0x0E, 0x00
_SUPER_BLOB, _DIRECTORY, _AD_HOC = 0xFADE0CC0, 0xFADE0C02, 0x2


@dataclass
class MachO:
    """A library's facts."""

    machine: int
    kind: int
    protections: dict[str, int] = field(default_factory=dict)  # of segments, at first
    needs: list[str] = field(default_factory=list)  # other libraries
    identity: str = ""
    oldest: tuple[int, int] = (0, 0)  # macOS
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    text_relocations: int = 0
    signature: bytes = b""
    signed_at: int = 0


def read(path: Path) -> MachO:
    """Read the facts of a library. Raises ValueError for any other file."""
    data = path.read_bytes()
    magic, machine, _, kind, count, _, _, _ = struct.unpack_from("<8I", data)
    if magic != MAGIC:
        raise ValueError(f"{path} is no Mach-O file of 64 bits")
    found, at = MachO(machine, kind), 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, at)
        if command == _SEGMENT:
            _segment(found, data, at)
        elif command == _SYMBOLS:
            _symbols(found, data, at)
        elif command in (_NEEDS, _IDENTITY):
            start = at + struct.unpack_from("<I", data, at + 8)[0]
            name = data[start : data.index(b"\0", start)].decode()
            if command == _NEEDS:
                found.needs.append(name)
            else:
                found.identity = name
        elif command == _BUILD:
            version = struct.unpack_from("<I", data, at + 12)[0]
            found.oldest = version >> 16, version >> 8 & 255
        elif command == _SIGNATURE:
            found.signed_at, length = struct.unpack_from("<2I", data, at + 8)
            found.signature = data[found.signed_at : found.signed_at + length]
        at += size
    return found


def _segment(found: MachO, data: bytes, at: int) -> None:
    name = data[at + 8 : at + 24].rstrip(b"\0").decode()
    _, _, _, _, _, first, sections, _ = struct.unpack_from("<4Q4I", data, at + 24)
    found.protections[name] = first
    for index in range(sections):
        section = at + 72 + 80 * index
        found.text_relocations += struct.unpack_from("<I", data, section + 60)[0] if name == "__TEXT" else 0


def _symbols(found: MachO, data: bytes, at: int) -> None:
    start, count, names, _ = struct.unpack_from("<4I", data, at + 8)
    for index in range(count):
        name, kind = struct.unpack_from("<IB", data, start + 16 * index)
        if kind & _EXTERNAL:
            text = data[names + name : data.index(b"\0", names + name)].decode()
            (found.undefined if kind & _TYPE == _UNDEFINED else found.defined).add(text)


def is_signed(path: Path) -> bool:
    """True if the file is signed ad hoc and each page of it has the digest that the signature says."""
    data, found = path.read_bytes(), read(path)
    blob = found.signature
    if not blob:
        return False
    magic, _, count = struct.unpack_from(">3I", blob)
    assert magic == _SUPER_BLOB, "not a signature"
    for index in range(count):
        start = struct.unpack_from(">2I", blob, 12 + 8 * index)[1]
        if struct.unpack_from(">I", blob, start)[0] == _DIRECTORY:
            _, _, _, flags, hashes, _, _, slots, limit = struct.unpack_from(">9I", blob, start)
            length, kind, _, page = struct.unpack_from(">4B", blob, start + 36)
            size = 1 << page
            pages = [data[at : min(at + size, limit)] for at in range(0, limit, size)]
            digests = [blob[at : at + length] for at in range(start + hashes, start + hashes + length * slots, length)]
            same = [hashlib.sha256(page).digest() for page in pages] == digests
            return bool(flags & _AD_HOC) and kind == 2 and limit == found.signed_at and same
    return False
