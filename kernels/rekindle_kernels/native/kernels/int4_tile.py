"""A tile of a product with a 4-bit matrix in registers: a few rows times one or two blocks of 16 outputs, over all
groups of inputs.

A load fills a vector with eight inputs of each of 16 outputs (`rekindle_kernels.int4`). Its low and its high halves of
bytes meet four 8-bit inputs of a row each, spread over a vector; of eight bits, two loads do that, and of six, three
make four such vectors. Indices of a codebook are taken apart alike, and one more instruction puts values in their
place. What a group adds up to is an exact integer; it is multiplied by the row's scale of that group, then by the
outputs' and added to what earlier groups have given. So the result of a row is the same to the last bit whatever tile
computes it, with whatever instructions.

Sums of integers begin at the bits of MAGIC, so that as a float they are MAGIC plus the sum, without a conversion. A
row's scale has 22 bits, so that MAGIC times the scale is exact, and (MAGIC + sum) · scale - MAGIC · scale, in one
operation, is the sum times the scale, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from rekindle_kernels.int4_format import EXPONENTS, INPUTS_OF, OUTPUTS, SPAN, STEP_BYTES, STEPPED, TILE
from rekindle_kernels.native import cpu
from rekindle_kernels.native.cpu import has_feature, on_arm
from rekindle_kernels.native.language import arm
from rekindle_kernels.native.language.jit import emits
from rekindle_kernels.native.language.memory import WORD, prefetch_at
from rekindle_kernels.native.language.vector import FLOATS, LANES, llvm_call

INT, BYTE = ir.IntType(32), ir.IntType(8)
_INTS, _HALF_INTS = ir.VectorType(INT, LANES), ir.VectorType(INT, LANES // 2)
_BYTES, _SHORTS = ir.VectorType(BYTE, 2 * LANES), ir.VectorType(ir.IntType(16), LANES)
_VECTOR_OF_BYTES = ir.VectorType(BYTE, 4 * LANES)
Codebook = tuple[int, ...]  # 16 unsigned bytes; empty where integers are stored
_LOW_BITS, _HIGH_PAIRS, _SIGN_BITS = 0x0F0F0F0F, 0x30303030, 0x80808080
STEP = {4: 4, 6: 1, 8: 2}  # tiles of the smallest group, by bits; of four bits, those of groups of 16 have HALF_STEP
HALF_STEP = 2  # with it, one row times groups of 32 and more takes up to 4.5 % longer
TILE_BYTES = {bits: OUTPUTS * inputs * bits // 8 for bits, inputs in INPUTS_OF.items()}

# What a row is packed into: its 8-bit integers, then for all groups four numbers of four bytes each: their scales, what
# the sums of their products begin at, the sums of their values, and -MAGIC times their scales.
SCALE, BEGIN, VALUES, BACK = range(4)
NUMBERS = 4
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000  # 1.5 · 2^23: one more is one more in its bits
UNPACKED = 4 * LANES * 4  # bytes of eight inputs of two blocks of outputs, an integer in each byte
assert OUTPUTS == LANES, "an output has a lane"
# By feature, the best first.
INSTRUCTIONS = {"avx512vnni": "vnni", "avxvnni": "avxvnni", "avx2": "avx2", "dotprod": "dotprod", "neon": "neon"}
SIGNED = ("dotprod", "neon")  # those that multiply signed bytes with signed ones


def best_instruction() -> str:
    """Return the name of what this processor multiplies with."""
    return next((name for feature, name in INSTRUCTIONS.items() if has_feature(feature)), "any")


def multiply_tile(
    rows: int,
    vectors: int,
    instruction: str,
    *,
    scale: str,
    bits: int = 4,
    step: int = STEP[4],
    codebook: Codebook = (),
    prefetches: bool = False,
    unpacked: bool = False,
) -> Any:
    """Return `tile(weights, scales, minimums, further, further_scales, x, stride, groups, steps, sums)`.

    Packed rows lie `stride` bytes apart at x. The second block of outputs has its weights `further` bytes after those
    of the first, and its scales and minimums `further_scales` bytes. A group has `steps` times `step` tiles;
    `minimums` may be 0. Sums are float32 [vectors, rows, 16]. `instruction` is one that `best_instruction` names, and
    `scale` the dtype of scales. With `unpacked`, weights are what `unpacker` made of two blocks. Integers of eight bits
    are multiplied as if 128 were added to them, unless the instruction is in SIGNED; those of six as they are stored.
    What is stored are indices where there is a `codebook`.
    """
    in_registers = rows * vectors <= 8
    count, tile_bytes, tile_inputs = rows * vectors, TILE_BYTES[bits], INPUTS_OF[bits]
    apart = UNPACKED * tile_inputs // 8 if unpacked else tile_bytes
    cache, ahead = cpu.prefetch().grouped
    narrow = bits < 8 and max(codebook, default=0) < 128
    integers = _signed if instruction in SIGNED else stored_integers

    @emits(types.void, *[types.int64] * 10)
    def tile(
        builder: Any, weights: Any, scales: Any, minimums: Any, further: Any, further_scales: Any, x: Any, stride: Any,
        groups: Any, steps: Any, sums: Any,
    ) -> None:  # fmt: skip
        fma = llvm_call(f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS)

        def at(address: Any, kind: ir.Type) -> Any:
            return builder.inttoptr(address, kind.as_pointer())

        def times(a: Any, b: Any) -> Any:
            return builder.mul(a, b if isinstance(b, ir.Value) else WORD(b))

        begins = [x] + [builder.add(x, times(stride, row)) for row in range(1, rows)]
        places = [builder.add(sums, WORD(4 * LANES * index)) for index in range(count)]
        totals = [cgutils.alloca_once(builder, _INTS) for _ in range(count)]
        kept = [cgutils.alloca_once(builder, FLOATS) if in_registers else at(place, FLOATS) for place in places]
        for one in kept:
            builder.store(ir.Constant(FLOATS, [0.0] * LANES), one, align=64 if in_registers else 4)
        width = times(times(groups, steps), step * tile_inputs)  # inputs, and bytes of a row's integers
        scales_at = scale_reader(builder, scale, times(steps, step * tile_inputs))

        def number(row: int, group: Any, which: int, kind: ir.Type) -> Any:
            behind = builder.add(width, times(builder.add(times(groups, which), group), 4))
            return everywhere(builder, builder.load(at(builder.add(begins[row], behind), kind)), kind)

        def loaded(address: Any, four: int) -> list[Any]:
            places = (builder.add(address, WORD(4 * LANES * index)) for index in (2 * four, 2 * four + 1))
            return [builder.load(at(place, _INTS), align=64) for place in places]

        with cgutils.for_range(builder, groups) as outer:
            group = outer.index
            for row in range(rows):
                offset = number(row, group, BEGIN, INT)
                for vector in range(vectors):
                    builder.store(offset, totals[vector * rows + row])
            with cgutils.for_range(builder, steps) as inner:
                first = times(builder.add(times(group, steps), inner.index), step)
                for each in range(step):
                    number_of_tile = builder.add(first, WORD(each))
                    address = builder.add(weights, times(number_of_tile, apart))
                    for line in range(0, tile_bytes if prefetches else 0, TILE):
                        prefetch_at(builder, builder.add(address, WORD(ahead + line)), cache)
                    if unpacked:
                        fours: Iterable[Any] = (loaded(address, four) for four in range(tile_inputs // 4))
                    else:
                        pair = [address, builder.add(address, further)][:vectors]
                        fours = zip(*(integers(builder, bits, place, codebook) for place in pair), strict=True)
                    for four, columns in enumerate(fours):
                        inputs = builder.add(times(number_of_tile, tile_inputs), WORD(4 * four))
                        for row in range(rows):
                            here = [totals[vector * rows + row] for vector in range(vectors)]
                            word = builder.add(begins[row], inputs)
                            before = [builder.load(total) for total in here]
                            after = _add_row(builder, instruction, word, list(columns), before, narrow=narrow)
                            for total, value in zip(here, after, strict=True):
                                builder.store(value, total)
            vector_starts = [WORD(0), further_scales][:vectors]
            factors = [scales_at(builder.add(scales, start), group) for start in vector_starts]
            for row in range(rows):
                factor, back = (number(row, group, which, ir.FloatType()) for which in (SCALE, BACK))
                for vector in range(vectors):
                    index = vector * rows + row
                    exact = builder.bitcast(builder.load(totals[index]), FLOATS)
                    scaled = fma(builder, exact, factor, back)
                    added = fma(builder, scaled, factors[vector], builder.load(kept[index], align=4))
                    builder.store(added, kept[index], align=4)
            if not codebook:
                with builder.if_then(builder.icmp_signed("!=", minimums, WORD(0))):
                    lowest = [scales_at(builder.add(minimums, start), group) for start in vector_starts]
                    for row in range(rows):
                        values = number(row, group, VALUES, ir.FloatType())
                        for vector in range(vectors):
                            index = vector * rows + row
                            added = fma(builder, values, lowest[vector], builder.load(kept[index], align=4))
                            builder.store(added, kept[index], align=4)
        if in_registers:
            for place, one in zip(places, kept, strict=True):
                builder.store(builder.load(one), at(place, FLOATS), align=4)

    return tile


def scale_reader(builder: Any, dtype: str, inputs: Any) -> Any:
    """Return `numbers(start, group)`: the scales of 16 outputs in a group of so many inputs, as float32; row of
    `scale` at `start`."""

    def load(address: Any, kind: ir.Type) -> Any:
        return builder.load(builder.inttoptr(address, ir.VectorType(kind, LANES).as_pointer()), align=1)

    if dtype == EXPONENTS:

        def powers(start: Any, group: Any) -> Any:
            """Return the scales that 16 stored exponents stand for, as `int4.exponent_numbers` does."""
            stored = load(builder.add(start, builder.mul(group, WORD(LANES))), BYTE)
            exponents, one = builder.zext(stored, _INTS), ir.Constant(_INTS, [1] * LANES)
            normal = builder.shl(builder.sub(exponents, one), ir.Constant(_INTS, [23] * LANES))
            subnormal = builder.shl(builder.add(exponents, one), ir.Constant(_INTS, [21] * LANES))
            larger = builder.select(builder.icmp_signed(">", normal, subnormal), normal, subnormal)
            return builder.bitcast(larger, FLOATS)

        return powers
    if dtype != STEPPED:
        kind = ir.FloatType() if dtype == "float32" else ir.HalfType()

        def plain(start: Any, group: Any) -> Any:
            found = load(builder.add(start, builder.mul(group, WORD(LANES * (4 if dtype == "float32" else 2)))), kind)
            return found if dtype == "float32" else builder.fpext(found, FLOATS)

        return plain
    each = builder.udiv(WORD(SPAN), inputs)  # groups of a step; a power of two
    shift, rest = builder.cttz(each, ir.Constant(ir.IntType(1), 1)), builder.sub(each, WORD(1))
    span_bytes = builder.mul(builder.add(each, WORD(STEP_BYTES)), WORD(LANES))

    def with_steps(start: Any, group: Any) -> Any:
        span = builder.add(start, builder.mul(builder.lshr(group, shift), span_bytes))
        integers = load(builder.add(span, builder.mul(builder.and_(group, rest), WORD(LANES))), BYTE)
        steps = load(builder.add(span, builder.mul(each, WORD(LANES))), ir.HalfType())
        return builder.fmul(builder.sitofp(builder.sext(integers, _INTS), FLOATS), builder.fpext(steps, FLOATS))

    return with_steps


def everywhere(builder: Any, value: Any, kind: ir.Type) -> Any:
    vector = ir.VectorType(kind, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


def _halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Return the low and the high four bits of each byte."""
    mask = ir.Constant(_INTS, [_LOW_BITS] * LANES)
    shifted = builder.lshr(pairs, ir.Constant(_INTS, [4] * LANES))
    return builder.and_(pairs, mask), builder.and_(shifted, mask)


def _six(builder: Any, pointer: Any) -> Iterator[Any]:
    """The integers of a tile of six bits as bytes, four inputs after the other four, as they are stored: from 0 to 63.

    Each is made when it is asked for: all four of two blocks would fill too many registers.
    """
    mask = ir.Constant(_INTS, [_HIGH_PAIRS] * LANES)

    def line(number: int) -> Any:
        return builder.load(builder.gep(pointer, [WORD(number)]), align=4)

    def shifted(left: int) -> Any:
        by = ir.Constant(_INTS, [abs(left)] * LANES)
        return high if left == 0 else builder.shl(high, by) if left > 0 else builder.lshr(high, by)

    high = line(2)
    for number in range(2):
        for half, low in enumerate(_halves(builder, line(number))):
            yield builder.or_(low, builder.and_(shifted(4 - 4 * number - 2 * half), mask))


def _looked_up(builder: Any, codebook: Codebook, indices: Any) -> Any:
    """Return the values of a codebook in the place of their indices, which the bytes of a vector are."""
    if not codebook:
        return indices
    octets = builder.bitcast(indices, _VECTOR_OF_BYTES)
    if on_arm():
        width, look_up = 16, arm.look_up
    elif has_feature("avx512bw") or has_feature("avx2"):
        width, name = (64, "avx512.pshuf.b.512") if has_feature("avx512bw") else (32, "avx2.pshuf.b")
        kind = ir.VectorType(BYTE, width)

        def look_up(builder: Any, part: Any, table: Any) -> Any:
            function = ir.FunctionType(kind, [kind, kind])
            return builder.call(
                cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.{name}"), [table, part]
            )

    else:
        found = ir.Constant(_VECTOR_OF_BYTES, [codebook[0]] * 4 * LANES)
        for index, value in enumerate(codebook[1:], 1):
            here = builder.icmp_unsigned("==", octets, ir.Constant(_VECTOR_OF_BYTES, [index] * 4 * LANES))
            found = builder.select(here, ir.Constant(_VECTOR_OF_BYTES, [value] * 4 * LANES), found)
        return builder.bitcast(found, _INTS)
    table = ir.Constant(ir.VectorType(BYTE, width), list(codebook) * (width // len(codebook)))
    parts = []
    for start in range(0, 4 * LANES, width):
        lanes = ir.Constant(ir.VectorType(INT, width), list(range(start, start + width)))
        parts.append(look_up(builder, builder.shuffle_vector(octets, octets, lanes), table))
    while len(parts) > 1:
        lanes = ir.Constant(ir.VectorType(INT, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(*parts[at : at + 2], lanes) for at in range(0, len(parts), 2)]
    return builder.bitcast(parts[0], _INTS)


def stored_integers(builder: Any, bits: int, address: Any, codebook: Codebook = ()) -> Iterable[Any]:
    """Return the integers of the tile at `address` as unsigned bytes, its first four inputs, then the next ones. Four
    and six bits are returned as stored, eight bits plus 128, and indices as the codebook's bytes.
    """
    pointer = builder.inttoptr(address, _INTS.as_pointer())
    if bits == 4:
        halves = _halves(builder, builder.load(pointer, align=4))
        return [_looked_up(builder, codebook, half) for half in halves]
    if bits == 6:
        return _six(builder, pointer)
    first, second = (builder.load(builder.gep(pointer, [WORD(half)]), align=4) for half in range(2))
    signs = ir.Constant(_INTS, [_SIGN_BITS] * LANES)
    return builder.xor(first, signs), builder.xor(second, signs)


def _signed(builder: Any, bits: int, address: Any, codebook: Codebook = ()) -> Iterable[Any]:
    """Return the same as they are: the integers of four bits, and of six as stored, are no larger than signed bytes."""
    pointer = builder.inttoptr(address, _INTS.as_pointer())
    if bits == 6:
        return _six(builder, pointer)
    if bits == 4:
        pairs = builder.bitcast(builder.load(pointer, align=4), _VECTOR_OF_BYTES)
        low = builder.and_(pairs, ir.Constant(_VECTOR_OF_BYTES, [15] * 4 * LANES))
        high = builder.lshr(pairs, ir.Constant(_VECTOR_OF_BYTES, [4] * 4 * LANES))
        return [_looked_up(builder, codebook, builder.bitcast(half, _INTS)) for half in (low, high)]
    first, second = (builder.load(builder.gep(pointer, [WORD(half)]), align=4) for half in range(2))
    return first, second


def _add_row(
    builder: Any, instruction: str, word: Any, columns: list[Any], sums: list[Any], *, narrow: bool
) -> list[Any]:
    """Return the sums and the products of the four 8-bit inputs at address `word` with four unsigned bytes of each
    lane, which are below 128 if they are `narrow`."""
    if instruction == "vnni":
        return _with_vnni(builder, word, columns, sums)
    inputs = builder.load(builder.inttoptr(word, INT.as_pointer()))
    if instruction in SIGNED:
        spread = everywhere(builder, inputs, INT)
        dot = arm.dot if instruction == "dotprod" else arm.widened_dot
        return [arm.in_parts(builder, dot, *pair, spread) for pair in zip(sums, columns, strict=True)]
    if instruction == "avxvnni":
        spread = everywhere(builder, inputs, INT)
        return [_with_avxvnni(builder, spread, *pair) for pair in zip(columns, sums, strict=True)]
    if instruction == "avx2":
        return [_with_avx2(builder, inputs, *pair, narrow=narrow) for pair in zip(columns, sums, strict=True)]
    return [_with_any(builder, inputs, *pair) for pair in zip(columns, sums, strict=True)]


def _with_vnni(builder: Any, word: Any, columns: list[Any], sums: list[Any]) -> list[Any]:
    """Multiplies by assembly, for the reason in `gemm_tile`; a single product takes the word from memory by itself."""
    count = len(sums)
    if count == 1:
        lines = ["vpdpbusd ($2){1to16}, $1, $0"]
        kind = ir.FunctionType(_INTS, [_INTS, WORD, _INTS])
        return [builder.asm(kind, lines[0], "=v,v,r,0", [*columns, word, *sums], side_effect=False)]
    lines = [f"vpbroadcastd (${2 * count + 1}), ${count}"]
    lines += [f"vpdpbusd ${count}, ${count + 1 + i}, ${i}" for i in range(count)]
    registers = ["=v"] * count + ["=&v"] + ["v"] * count + ["r"] + [str(i) for i in range(count)]
    results = ir.LiteralStructType([_INTS] * (count + 1))
    kind = ir.FunctionType(results, [_INTS] * count + [WORD] + [_INTS] * count)
    added = builder.asm(kind, "\n".join(lines), ",".join(registers), [*columns, word, *sums], side_effect=False)
    return [builder.extract_value(added, i) for i in range(count)]


def _with_avxvnni(builder: Any, spread: Any, column: Any, total: Any) -> Any:
    """Return the instruction of registers of eight lanes, for each half of a vector."""
    kind = ir.FunctionType(_HALF_INTS, [_HALF_INTS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.256")
    found = []
    for start in (0, LANES // 2):
        lanes = ir.Constant(_HALF_INTS, list(range(start, start + LANES // 2)))
        halves = [builder.shuffle_vector(vector, vector, lanes) for vector in (total, column, spread)]
        found.append(builder.call(function, halves))
    return builder.shuffle_vector(*found, ir.Constant(_INTS, list(range(LANES))))


def _with_avx2(builder: Any, inputs: Any, column: Any, total: Any, *, narrow: bool) -> Any:
    """Two products of 7 and 8 bits fit into 16 bits, so that nothing saturates. Two of 8 and 8 bits do not: their bytes
    are widened before."""
    products = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_SHORTS, [_BYTES, _BYTES]), "llvm.x86.avx2.pmadd.ub.sw"
    )
    pairs = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_HALF_INTS, [_SHORTS, _SHORTS]), "llvm.x86.avx2.pmadd.wd"
    )
    spread = everywhere(builder, inputs, INT)
    ones, eight = ir.Constant(_SHORTS, [1] * LANES), ir.Constant(_SHORTS, [8] * LANES)
    found = []
    for start in (0, LANES // 2):
        lanes = ir.Constant(_HALF_INTS, list(range(start, start + LANES // 2)))
        halves = [builder.shuffle_vector(vector, vector, lanes) for vector in (column, spread)]
        if narrow:
            w, x = (builder.bitcast(half, _BYTES) for half in halves)
            found.append(builder.call(pairs, [builder.call(products, [w, x]), ones]))
            continue
        w, x = (builder.bitcast(half, _SHORTS) for half in halves)
        even = builder.lshr(builder.shl(w, eight), eight), builder.ashr(builder.shl(x, eight), eight)
        odd = builder.lshr(w, eight), builder.ashr(x, eight)
        found.append(builder.add(builder.call(pairs, even), builder.call(pairs, odd)))
    both = builder.shuffle_vector(*found, ir.Constant(_INTS, list(range(LANES))))
    return builder.add(total, both)


def _with_any(builder: Any, inputs: Any, column: Any, total: Any) -> Any:
    for byte in range(4):
        x = builder.ashr(builder.shl(inputs, INT(24 - 8 * byte)), INT(24))
        shifted = builder.lshr(column, ir.Constant(_INTS, [8 * byte] * LANES))
        w = builder.and_(shifted, ir.Constant(_INTS, [0xFF] * LANES))
        total = builder.add(total, builder.mul(w, everywhere(builder, x, INT)))
    return total


def unpacker(bits: int, offset: int = 0, codebook: Codebook = ()) -> Any:
    """Return `unpack(weights, target, inputs)`: the weights of a block of outputs, an unsigned integer less `offset` in
    each byte. The first four inputs lie at `target`, and every further four two vectors later.
    """

    @emits(types.void, types.int64, types.int64, types.int64)
    def unpack(builder: Any, weights: Any, target: Any, inputs: Any) -> None:
        tiles = builder.udiv(inputs, WORD(INPUTS_OF[bits]))
        many = ir.VectorType(BYTE, 4 * LANES)
        subtracted = ir.Constant(many, [offset] * 4 * LANES)

        def at(start: Any, index: Any, size: int, behind: int = 0) -> Any:
            return builder.add(start, builder.add(builder.mul(index, WORD(size)), WORD(behind)))

        with cgutils.for_range(builder, tiles) as loop:
            fours = tuple(stored_integers(builder, bits, at(weights, loop.index, TILE_BYTES[bits]), codebook))
            for four, integers in enumerate(fours):
                values = builder.sub(builder.bitcast(integers, many), subtracted)
                place = at(target, loop.index, len(fours) * UNPACKED // 2, four * UNPACKED // 2)
                builder.store(values, builder.inttoptr(place, many.as_pointer()), align=64)

    return unpack
