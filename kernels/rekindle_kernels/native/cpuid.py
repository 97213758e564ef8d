"""The features of an x86-64 processor by its instruction CPUID, for systems that have no file of them.

The machine code lies in memory of its own, so nothing has to be compiled or loaded before kernels are chosen.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple


class Registers(NamedTuple):
    """The registers after CPUID of a leaf, as unsigned numbers of 32 bits."""

    eax: int
    ebx: int
    ecx: int
    edx: int


class Processor(NamedTuple):
    """The two instructions that describe a processor."""

    cpuid: Callable[[int, int], Registers]  # of a leaf and a leaf below it
    xgetbv: Callable[[], int]  # the kinds of registers that the system saves, one bit each


# f(words): CPUID of the leaf words[0] and its part words[1]; then the words are eax, ebx, ecx, edx. The address comes
# in rcx, as on Windows. The caller's rbx waits in r9.
CPUID = bytes.fromhex("4989c8 4989d9 418b00 418b4804 0fa2 418900 41895804 41894808 4189500c 4c89cb c3")
# f(words): XGETBV 0; then the first two words are eax and edx.
XGETBV = bytes.fromhex("4989c8 31c9 0f01d0 418900 41895004 c3")
FROM_RDI = bytes.fromhex("4889f9")  # before either of them, where the first argument comes in rdi

# Bits of registers by LLVM's names: leaf, leaf below it, register, bit.
FEATURES = {
    "avx": (1, 0, "ecx", 28), "f16c": (1, 0, "ecx", 29), "fma": (1, 0, "ecx", 12), "movbe": (1, 0, "ecx", 22),
    "avx2": (7, 0, "ebx", 5), "bmi": (7, 0, "ebx", 3), "bmi2": (7, 0, "ebx", 8), "avx512f": (7, 0, "ebx", 16),
    "avx512dq": (7, 0, "ebx", 17), "avx512cd": (7, 0, "ebx", 28), "avx512bw": (7, 0, "ebx", 30),
    "avx512vl": (7, 0, "ebx", 31), "avx512vnni": (7, 0, "ecx", 11), "avx512_fp16": (7, 0, "edx", 23),
    "amx-bf16": (7, 0, "edx", 22), "amx-int8": (7, 0, "edx", 25), "avxvnni": (7, 1, "eax", 4),
    "avx512bf16": (7, 1, "eax", 5), "lzcnt": (0x80000001, 0, "ecx", 5),
}  # fmt: skip
OSXSAVE = 1, 0, "ecx", 27  # the system says by XGETBV what it saves
# What it has to save for features whose names begin like this. The first that fits counts.
SAVED = {"amx": 0x60006, "avx512": 0xE6, "avx": 0x6, "f16c": 0x6, "fma": 0x6}


def features(processor: Processor) -> frozenset[str]:
    """Return the features that the processor has and the system allows."""

    def has(place: tuple[int, int, str, int]) -> bool:
        leaf, below, register, bit = place
        highest = processor.cpuid(leaf & 0x80000000, 0).eax
        if leaf > highest or (below and below > processor.cpuid(leaf, 0).eax):
            return False
        number: int = getattr(processor.cpuid(leaf, below), register)
        return bool(number >> bit & 1)

    saved = processor.xgetbv() if has(OSXSAVE) else 0

    def allowed(name: str) -> bool:
        needed = next((mask for start, mask in SAVED.items() if name.startswith(start)), 0)
        return saved & needed == needed

    return frozenset(name for name, place in FEATURES.items() if allowed(name) and has(place))


def vendor(processor: Processor) -> str:
    """Return the maker's name in twelve letters, such as "GenuineIntel"."""
    found = processor.cpuid(0, 0)
    return struct.pack("<3I", found.ebx, found.edx, found.ecx).decode("ascii", "replace")


def identity(processor: Processor) -> str:
    """Return the text that tells this processor from others, as far as a compiler looks at it."""
    return f"{vendor(processor)} {processor.cpuid(1, 0).eax:08x} {' '.join(sorted(features(processor)))}"


_kept: list[memoryview] = []  # memory of code that may be called until the process ends


@cache
def own() -> Processor:
    """Return this processor. Raise OSError where the system gives no memory for code."""
    from rekindle_kernels import system  # no source of kernels, whose digest covers what compiling imports

    start = b"" if sys.platform == "win32" else FROM_RDI
    codes = [start + CPUID, start + XGETBV]
    offset = -(-len(codes[0]) // 16) * 16
    memory = system.code_memory(offset + len(codes[1]))
    for at, code in zip((0, offset), codes, strict=True):
        memory[at : at + len(code)] = code
    system.make_executable(memory)
    _kept.append(memory)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    functions = [function(first + at) for at in (0, offset)]

    def cpuid(leaf: int, below: int) -> Registers:
        words = (ctypes.c_uint32 * 4)(leaf, below)
        functions[0](ctypes.addressof(words))
        return Registers(*words)

    def xgetbv() -> int:
        words = (ctypes.c_uint32 * 4)()
        functions[1](ctypes.addressof(words))
        return int(words[0] | words[1] << 32)

    return Processor(cpuid, xgetbv)
