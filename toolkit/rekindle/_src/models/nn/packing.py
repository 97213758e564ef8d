"""The storage of a matrix in groups of four, six or eight bits, derived from a plan's kind and the matrix's shape.

Kinds are text, as a graph and its JSON hold them: `int4`, with `-32`, `-64` or `-128` for the inputs of a group, then
`-min` where groups have minimums, then `-f32` where scales and minimums are float32, or `-k` where they are integers
with steps: `int4-32` holds Q4_0, `int4-32-min` Q4_1, `int4-128-min-f32` AWQ and GPTQ with zeros, `int4-32-min-k` Q4_K.
Users name the first four.
Only files have the other kinds. `int8-32` and so on are groups of eight bits, and `int6-32` of six: Q8_0, Q6_K, Q5_0
and others. `fp4-32` has four bits that are indices of a codebook, the 4-bit floats of MXFP4 with exponents as scales,
`iq4-32` holds IQ4_NL, `iq4-32-k` IQ4_XS, and `iq4-16-f32` IQ2_S and others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rekindle.errors import ConfigError
from rekindle_kernels import int4

_SUFFIXES = {"float16": "", "float32": "-f32", int4.STEPPED: "-k", int4.EXPONENTS: ""}
PREFERRED = 64  # inputs of a group where a plan has no size; 32 where 64 does not divide the inputs


class Packing(NamedTuple):
    """A matrix of four, six or eight bits in groups, or of a codebook, as `rekindle_kernels.int4` stores it."""

    group: int
    minimum: bool = False  # groups have minimums
    scales: str = "float16"  # the dtype of scales and minimums; int8 ones have steps
    bits: int = 4
    codes: bool = False  # integers are indices of the codebook that belongs to the scales

    @property
    def kind(self) -> str:
        """The kind with every detail written out."""
        name = "int" if not self.codes else "fp" if self.scales == int4.EXPONENTS else "iq"
        return f"{name}{self.bits}-{self.group}{'-min' * self.minimum}{_SUFFIXES[self.scales]}"

    @property
    def dtype(self) -> str:
        """The dtype of the matrix's `weight`."""
        return int4.CODES if self.codes else int4.DTYPES[self.bits]

    @property
    def as_integers(self) -> Packing:
        """The packing that holds the same numbers as integers, without a codebook."""
        if not self.codes:
            return self
        if self.scales == int4.EXPONENTS:
            return self._replace(scales="float32", bits=6, codes=False)
        return self._replace(bits=8, codes=False)

    @property
    def unit(self) -> int:
        """Inputs that stay together where a matrix is divided."""
        return int4.SPAN if self.scales == int4.STEPPED else self.group


def packing(kind: str | None, path: str, shape: tuple[int, ...]) -> Packing | None:
    """Return the packing of a matrix [out, in] or a stack of them; None for kinds that are not in groups.

    Raise ConfigError for a matrix that can't be stored like this.
    """
    if kind is None or not re.match(r"int4|(int[68]|fp4|iq4)-\d", kind):
        return None
    match = re.fullmatch(r"(int|fp|iq)([468])(?:-(\d+))?(-min)?(-f32|-k)?", kind)
    assert match is not None, f"kind {kind!r}"
    name, bits, size, minimum, suffix = match.groups()
    outputs, inputs = shape[-2:]
    group = int(size) if size else PREFERRED if inputs % PREFERRED == 0 else min(int4.GROUPS)
    reason = int4.reason_against(outputs, inputs, group)
    if reason is not None:
        raise ConfigError(
            "quantize",
            kind,
            f"{path} can't be kept in four bits: {reason}",
            'Keep this part in eight, as quantize={"attention": "int8", "mlp": "int4"} does',
        )
    scales = next(dtype for dtype, ending in _SUFFIXES.items() if ending == (suffix or ""))
    return Packing(group, minimum is not None, int4.EXPONENTS if name == "fp" else scales, int(bits), name != "int")


class StoredArray(Protocol):
    """A leaf of a model: an array, or its shape and dtype alone."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def matrix_shape(leaf: StoredArray) -> tuple[int, ...]:
    """Return the shape of a stored matrix in checkpoints' form: [out, in], or [experts, out, in]."""
    shape: tuple[int, ...] = tuple(leaf.shape)
    return int4.matrix_shape(leaf) if is_packed(leaf) else shape


def is_packed(leaf: StoredArray) -> bool:
    """True if a leaf is the `weight` of a matrix in groups: nothing else has these dtypes."""
    return str(leaf.dtype) in int4.COLUMNS


def packing_of(weight: Any, scale: Any = None, minimum: Any = None) -> Packing | None:
    """Return the packing of a matrix by its leaves; None for one that is not in groups."""
    if not is_packed(weight):
        return None
    dtype = str(weight.dtype)
    group, codes = int4.group_of(weight, scale), dtype == int4.CODES
    return Packing(group, minimum is not None, str(scale.dtype), int4.BITS[dtype], codes)


def packings_in(leaves: Mapping[str, Any]) -> dict[str, Packing]:
    """Return the packings of the matrices in groups among a model's leaves, by the paths of their weights."""
    packings = {}
    for path, leaf in leaves.items():
        siblings = (path.removesuffix("weight") + name for name in ("scale", "minimum"))
        packing = packing_of(leaf, *(leaves[sibling] for sibling in siblings if sibling in leaves))
        if packing is not None:
            packings[path] = packing
    return packings
