"""Object code that is brought into memory without LLVM, and what is left to LLVM."""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from collections.abc import Callable

import pytest

from helpers.kernel_state import stored
from rekindle_kernels.native import build, object_loader
from rekindle_kernels.native.chain_plan import CHAIN, ENTRIES

if build.unavailable_reason() is not None:
    pytest.skip("numba is not installed", allow_module_level=True)
if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("LLVM loads the code of other platforms", allow_module_level=True)

KNOWN = {ENTRIES: 0x1234_5678_9ABC}


@pytest.fixture(scope="module")
def code() -> bytes:
    """The kernel of chains, which refers to its table as well as to the C library."""
    build.ensure(CHAIN)
    kept = stored(CHAIN)
    if kept is None and not build.can_compile():
        pytest.skip("nothing compiles kernels here")
    return kept or build._compile(CHAIN)  # where it came with the installation


def test_the_code_is_there_with_all_addresses(code: bytes) -> None:
    address = object_loader.load(code, build.entry(CHAIN), KNOWN)
    assert address
    memory = object_loader._loaded[-1]
    assert struct.pack("<Q", KNOWN[ENTRIES]) in bytes(memory)
    malloc = ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value
    assert malloc is not None and struct.pack("<Q", malloc) in bytes(memory)
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    spans = [(*(int(end, 16) for end in line[0].split("-")), line[1]) for line in lines]
    assert [rights for start, end, rights in spans if start <= address < end] == ["r-xp"]


def test_it_is_the_one_that_serves(code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_by_llvm", lambda name, code: pytest.fail("LLVM was asked"))
    assert build._load(CHAIN, code)


def changed(code: bytes, at: int, kind: str, value: int) -> bytes:
    found = bytearray(code)
    struct.pack_into(kind, found, at, value)
    return bytes(found)


def relocations(code: bytes) -> int:
    """Where the first table of relocations lies."""
    return next(section.offset for section in object_loader._sections(code) if section.kind == 4)


def writable(code: bytes) -> bytes:
    start = struct.unpack_from("<Q", code, 40)[0]
    sections = object_loader._sections(code)
    number = next(number for number, each in enumerate(sections) if each.flags & 2 and each.size)
    return changed(code, start + 64 * number + 8, "<Q", sections[number].flags | 1)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda code: b"",
    "cut": lambda code: code[:-200],
    "another processor": lambda code: changed(code, 18, "<H", 183),
    "a relative address": lambda code: changed(code, relocations(code) + 8, "<I", 2),
    "an address outside": lambda code: changed(code, relocations(code), "<Q", 1 << 40),
    "a writable section": writable,
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_is_not_known_is_left_to_llvm(code: bytes, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_by_llvm", lambda name, code: 77)
    assert build._load(CHAIN, CHANGES[change](code)) == 77


def test_functions_that_are_nowhere_are_left_to_llvm(code: bytes) -> None:
    assert object_loader.load(code, build.entry(CHAIN), {}) is None, "the table is in no library"
    assert object_loader.load(code, "rekindle_another", KNOWN) is None
