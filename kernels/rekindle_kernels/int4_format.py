"""The format of matrices of four bits, of six or eight, and of codebooks, in groups: their arrays, and their values.

A matrix [N, K] (N outputs, K inputs) consists of integers q from 0 to 15. Each `group` of consecutive inputs of an
output has a scale, and a minimum or none:

    value = scale * (q - 8)            without minimums
    value = scale * q + minimum        with them

Matrices of eight bits have integers from -128 to 127, those of six from -32 to 31, and no number is subtracted from
them. The group is 16, 32, 64 or 128 inputs. It divides K, and 16 divides N.

The integers of a codebook are indices of 16 values, and there are no minimums: value = scale * codebook[q]. The dtype
of the scales says which codebook it is (`CODEBOOKS`).

There are three arrays, of which the last may be missing (None); a stack of matrices has one more axis in front of each:

    weight   uint8                [N / 16, K * 8]             two integers in each byte
             or int32             [N / 16, K * 4]             one in each byte: a matrix of eight bits
             or uint32            [N / 16, K * 3]             four in three bytes: a matrix of six bits
             or int16             [N / 16, K * 4]             the bytes of uint8, two by two: indices of a codebook
    scale    float16 or float32   [N / 16, K / group * 16]
             or float8_e8m0fnu    [N / 16, K / group * 16]    of the codebook of 4-bit floats: exponents
             or int8              [N / 16, K / 256 * (4096 / group + 32)]
    minimum  as scale

Row b of each array belongs to the outputs 16 b to 16 b + 15. A row of `weight` is cut into tiles of 64 bytes, a cache
line; tile t holds the inputs 8 t to 8 t + 7. Its byte 4 o + i (output o of the 16, i from 0 to 3) has q of the input
8 t + i in its low four bits and that of the input 8 t + 4 + i in its high ones. A row of `scale` and of `minimum` has
16 numbers for each group, one per output. A vector of 16 lanes of 32 bits so has one output in each lane, and four of
its inputs in the four bytes of the lane, which is what instructions that multiply bytes take; sums stay in their lanes.

With eight bits a tile is two cache lines: first the inputs 8 t to 8 t + 3, four bytes for each output, then the others.

With six bits a tile holds the inputs 16 t to 16 t + 15 in three cache lines. 32 is added to each integer. The first two
lines have the low four bits of these sums, as two tiles of four bits; byte 4 o + i of the third has the two high bits
of the inputs 16 t + i, 16 t + 4 + i, 16 t + 8 + i and 16 t + 12 + i, the first of them in its lowest bits.

Scales of int8 are integers, and 256 inputs of an output share a float16 step: a scale is integer * step. For each 256
inputs, a row has 16 integers for each of their groups, one per output, and then the 16 steps in 32 bytes. Such products
are exact in float32.

Exponents are those of MXFP4. A byte e of them stands for 2 ** (e - 128), also 255, which is half of what it means in a
file: the codebook has twice the values of 4-bit floats (E2M1).

Other formats are converted exactly (by `pack` and `pack_scales`):

    Q4_0          group 32, scale float16; its integers are stored with the same offset of 8
    Q4_1          group 32, scale and minimum float16
    AWQ, GPTQ     group 128 (or 32, 64), scale float32 and minimum float32 = -scale * zero: 11 bits times 4 are exact in
                  float32 and not in float16; without zero points, or where all of them are 8, scale float16 alone
    Q4_K          group 32, scale and minimum int8: its 6-bit scales with steps d, its 6-bit minimums with steps -dmin;
                  4.6 bits per weight, where the file has 4.5

Scales and minimums are then those of the format to the last bit, their products with integers are exact in float32,
and a value is rounded once, where the minimum is added: as the format's own arithmetic in float32 rounds it.

Six bits with groups of 32 hold Q5_0 with float16 scales, Q5_1 with float16 minimums too, Q5_K with int8 scales and
minimums. Q6_K has groups of 16 and int8 scales: 6.6 bits per weight, as the file has. NVFP4 has groups of 16, halves of
integers from -12 to 12, and float32 scales; IQ3_XXS has groups of 32 and such scales.

Four bits with groups of 16 hold Q3_K, with int8 scales, and Q2_K, with minimums too: 4.6 and 5.1 bits per weight. With
groups of 64 or 128 they hold Q2_0, Q1_0, TQ1_0 and TQ2_0.

Codebooks with groups of 32 hold MXFP4 with its exponents (4.25 bits per weight, as the file has), IQ4_NL with float16
scales, IQ4_XS with int8 scales (4.3 bits). IQ1 and IQ2 have a codebook together, of the levels of their grids, with
float32 scales: 5 bits with groups of 32, 6 with groups of 16. Eight bits with groups of 32 hold Q8_0.
"""

from __future__ import annotations

GROUPS = (32, 64, 128)  # inputs that share a scale, where a matrix is quantised here
SMALLEST = 16  # in files
STORED_GROUPS = (SMALLEST, *GROUPS)
OUTPUTS = 16  # of a row of the arrays: lanes of a vector
INPUTS = 8  # of a tile of four bits
TILE = OUTPUTS * INPUTS // 2  # bytes: a cache line
ROW_BYTES = TILE // INPUTS  # of a row of `weight` for each input
CODES = "int16"  # the dtype of `weight` where its integers are indices of a codebook
COLUMNS = {"uint8": ROW_BYTES, "uint32": 3, "int32": 4, CODES: 4}  # of `weight` for each input, by its dtype
DTYPES = {4: "uint8", 6: "uint32", 8: "int32"}  # of `weight` by bits, where they are integers
BITS = {**{dtype: bits for bits, dtype in DTYPES.items()}, CODES: 4}
INPUTS_OF = {4: INPUTS, 6: 2 * INPUTS, 8: INPUTS}  # of a tile, by bits
OFFSET = 8  # of integers without minimums
SIX_OFFSET = 32  # by which integers of six bits are stored larger
HIGHEST = 15
SCALES = ("float16", "float32")
STEPPED = "int8"  # scales that are integers, with a step for each SPAN inputs
EXPONENTS = "float8_e8m0fnu"  # scales that are powers of two
FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of a 4-bit float (E2M1)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
GRIDS = (-43, -25, -9, -8, -7, -1, 1, 7, 8, 9, 25, 43, 0, 0, 0, 0)  # of IQ1, times eight, and of IQ2
CODEBOOKS = {EXPONENTS: FLOATS, "float16": IQ4, STEPPED: IQ4, "float32": GRIDS}  # by the dtype of scales
STORED = {**dict.fromkeys(DTYPES.values(), (*SCALES, STEPPED)), CODES: tuple(CODEBOOKS)}  # dtypes of scales, by weight
# The same for the smallest groups, of weights whose kernels have code of their own for them.
STORED_SMALLEST = {DTYPES[4]: ("float32", STEPPED), CODES: ("float32",)}
SCALE_BYTES = {"float16": 2, "float32": 4, STEPPED: 1, EXPONENTS: 1}
SPAN = 256
STEP_BYTES = 2  # of an output
