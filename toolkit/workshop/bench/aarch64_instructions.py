"""Counts the instructions of AArch64 products: `python aarch64_instructions.py LIBRARY.so ...`.

A library is one of `python -m rekindle_kernels.native.build_library --levels armv8 ... --linker aarch64-linux-gnu-gcc`.
For each kernel in it, the innermost loops that multiply: how many instructions a pass has, and how many products it
adds up. A count says nothing about time: how many of them a processor does at once, and what memory gives, differ.
"""

from __future__ import annotations

import re
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

OBJDUMP = "aarch64-linux-gnu-objdump"
# Products that an instruction adds up in a register of 16 bytes. `sadalp` stands for the two `smull` before it.
PRODUCTS = {"sdot": 16, "smmla": 32, "bfdot": 8, "sadalp": 16, "mla": 4, "fmla": 4}
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t[0-9a-f]+ \t(\S+)\t?(.*)$")
_ENTRY = re.compile(r"^([0-9a-f]+) .* rekindle_(\w+)_entry_(\w+)$")


class Loop(NamedTuple):
    """One pass of an innermost loop."""

    instructions: int
    products: int


def loops(code: list[tuple[int, str, str]]) -> Iterator[tuple[int, Loop]]:
    """The innermost loops that multiply, each with its address: branches back with none between them and their
    target."""
    last = -1
    for index, (address, name, operands) in enumerate(code):
        if not (name.startswith("b.") or name in ("cbz", "cbnz", "tbz", "tbnz")):
            continue
        target = int(operands.split("<")[0].split(",")[-1], 16)
        if target >= address:
            continue
        body = code[index - (address - target) // 4 : index + 1]
        if target > last and body[0][0] == target:
            found = sum(PRODUCTS.get(each, 0) for _, each, _ in body)
            if found:
                yield target, Loop(len(body), found)
        last = address


def disassembled(library: str) -> list[tuple[int, str, str]]:
    """Address, name and operands of each instruction."""
    listing = subprocess.run([OBJDUMP, "-d", library], capture_output=True, text=True, check=True).stdout
    return [
        (int(found[1], 16), found[2], found[3]) for line in listing.splitlines() if (found := _INSTRUCTION.match(line))
    ]


def entries(library: str) -> list[tuple[int, str, str]]:
    """Address, kernel and level of each entry, in order. A kernel's code goes on until the next one begins."""
    table = subprocess.run([OBJDUMP, "-T", library], capture_output=True, text=True, check=True).stdout
    return sorted(
        (int(found[1], 16), found[2], found[3]) for line in table.splitlines() if (found := _ENTRY.match(line))
    )


def main() -> None:
    for library in sys.argv[1:]:
        kernels = entries(library)
        starts = [start for start, _, _ in kernels]
        seen: dict[tuple[str, str], set[Loop]] = {}
        for address, loop in loops(disassembled(library)):
            _, name, level = kernels[bisect_right(starts, address) - 1]
            seen.setdefault((name, level), set()).add(loop)
        for (name, level), found in seen.items():
            most = max(loop.products for loop in found)
            for loop in sorted(found):
                if loop.products >= most / 4:
                    rate = loop.instructions / loop.products
                    print(f"{name:20} {level:20} {loop.instructions:5} for {loop.products:5} products: {rate:.3f}")


if __name__ == "__main__":
    main()
