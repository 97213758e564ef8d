"""The tile registers of newer x86-64 processors (AMX), for numba: eight registers of up to 16 rows of 64 bytes.

Instructions are written as bytes, so that any compiler takes them and code for any processor may hold them. They run
where the processor has them and the system, asked by `allowed`, lets this process use them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from rekindle_kernels.native.language.jit import emits, jit
from rekindle_kernels.native.language.memory import LINE, WORD, set_word

MEMORY = 2 * LINE  # bytes that keep the shapes of the tile registers, and those of before
DEPTH = LINE  # bytes of a whole row
_NONE, _66, _F3, _F2 = range(4)  # prefixes


def _bytes(prefix: int, opcode: int, operands: int, *more: int, third: int = 0) -> str:
    code = [0xC4, 0xE2, (~third & 15) << 3 | prefix, opcode, operands, *more]
    return ".byte " + ", ".join(map(hex, code))


def _emit(builder: Any, code: str, *addresses: Any) -> None:
    """An instruction, with its addresses in rax and rcx."""
    kind = ir.FunctionType(ir.VoidType(), [WORD] * len(addresses))
    registers = ["{rax}", "{rcx}"][: len(addresses)]
    builder.asm(kind, code, ",".join([*registers, "~{memory}"]), addresses, side_effect=True)


def zero_tile(builder: Any, tile: int) -> None:
    _emit(builder, _bytes(_F2, 0x49, 0xC0 | tile << 3))


def load_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _emit(builder, _bytes(_F2, 0x4B, 0x04 | tile << 3, 0x08), address, stride)


def stream_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Load a tile without a place for it in the first cache."""
    _emit(builder, _bytes(_66, 0x4B, 0x04 | tile << 3, 0x08), address, stride)


def store_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _emit(builder, _bytes(_F3, 0x4B, 0x04 | tile << 3, 0x08), address, stride)


def add_products(builder: Any, sums: int, rows: int, weights: int) -> None:
    """Products of signed bytes."""
    _emit(builder, _bytes(_F2, 0x5E, 0xC0 | sums << 3 | rows, third=weights))


def add_products_of_pairs(builder: Any, sums: int, rows: int, columns: int) -> None:
    """Products of two bfloat16 in each word, added to float32."""
    _emit(builder, _bytes(_F3, 0x5C, 0xC0 | sums << 3 | rows, third=columns))


def _on_address(code: str) -> Any:
    @emits(types.void, types.int64)
    def instruction(builder: Any, address: Any) -> None:
        _emit(builder, code, address)

    return instruction


configure, configuration = _on_address(_bytes(_NONE, 0x49, 0x00)), _on_address(_bytes(_66, 0x49, 0x00))


@jit
def begin(memory: int, depth: int) -> None:
    """Shape the tile registers as 16 rows of a cache line, the seventh with rows of `depth` bytes, the eighth with as
    many rows as these have words; `memory` keeps how they were."""
    for index in range(8):
        set_word(memory, index, 0)
    line = DEPTH + (DEPTH << 16)  # the bytes of a row in two registers
    set_word(memory, 0, 1)
    set_word(memory, 2, line + (line << 32))
    set_word(memory, 3, line + (depth << 32) + (DEPTH << 48))
    set_word(memory, 6, 0x10101010101010 + ((depth // 4) << 56))
    configuration(memory + LINE)
    configure(memory)


@jit
def end(memory: int) -> None:
    """Leave the tile registers as they were."""
    configure(memory + LINE)


@emits(types.int64)
def allowed(builder: Any) -> Any:
    """1 if this process may use tile registers, as Linux allows on request; else 0."""
    arch_prctl, ask, tile_data = WORD(158), WORD(0x1023), WORD(18)
    kind = ir.FunctionType(WORD, [WORD] * 3)
    registers = "={rax},0,{rdi},{rsi},~{rcx},~{r11},~{memory},~{flags}"
    answer = builder.asm(kind, "syscall", registers, [arch_prctl, ask, tile_data], side_effect=True)
    return builder.zext(builder.icmp_signed("==", answer, WORD(0)), WORD)
