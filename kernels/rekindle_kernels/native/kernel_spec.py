"""What a kernel takes and gives, declared once: the kernel, its caller and the chain all read the same table.

A call has the operands of the table in the table's order, then one more that holds the kernel's settings, if it has
any: numbers that are known when the program is traced, and a bit for each optional operand that is there. An optional
operand that is not there is replaced by one element that is never read. One that stands behind the settings is left
out: programs without it are as if the table had none.

Axes are named. An axis has the same size wherever its name stands, T is the axis of a step's tokens, and a digit is a
size by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rekindle_kernels.native.layout import Layout, consecutive

TOKENS = "T"


@dataclass(frozen=True)
class Operand:
    """One array that a kernel reads. `dtype` None is the one in the kernel's name."""

    name: str
    axes: str  # names with spaces between them
    dtype: str | None = "float32"
    optional: bool = False
    fields: tuple[str, ...] = ()  # of an array that is a record of int32
    behind: bool = False  # it is optional and stands behind the settings; tables list such operands last

    @property
    def is_per_token(self) -> bool:
        """True if it has one row per token of the step."""
        return self.axes.split()[:1] == [TOKENS]

    @cached_property
    def record(self) -> Layout | None:
        """The layout of an array that is a record."""
        return consecutive(self.name, dict.fromkeys(self.fields, "int32")) if self.fields else None


@dataclass(frozen=True)
class Result:
    """One array that a kernel writes, into memory of its own or into that of operand `into`, if that is there."""

    name: str
    axes: str
    dtype: str | None = "float32"
    into: str | None = None

    @property
    def is_per_token(self) -> bool:
        """True if it has one row per token of the step."""
        return self.axes.split()[:1] == [TOKENS]


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """The table of one kernel."""

    kind: str
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    settings: Mapping[str, str] = field(default_factory=dict)  # "int32" or "float32" by name
    parameters: tuple[str, ...] = ()  # what its names tell beside the kind: "dtype", "head_dim"

    def __post_init__(self) -> None:
        assert "_" not in self.kind, f"{self.kind} has to be one word: names are cut at underscores"

    @cached_property
    def optional(self) -> tuple[str, ...]:
        """Operands that need not be there, in the order of their bits."""
        return tuple(operand.name for operand in self.operands if operand.optional)

    @cached_property
    def settings_layout(self) -> Layout | None:
        """The operand of settings: `present`, the bits of the optional operands that are there, and the settings."""
        kinds = {"present": "int32", **self.settings} if self.optional or self.settings else {}
        return consecutive(f"{self.kind} settings", kinds) if kinds else None

    def has(self, operand: str) -> bool:
        """True if there is an operand of that name."""
        return any(each.name == operand for each in self.operands)

    def index(self, operand: str) -> int:
        """Return an operand's place in a call, also that of "settings"."""
        names = [each.name for each in self.operands if not each.behind]
        return [*names, "settings", *(each.name for each in self.operands if each.behind)].index(operand)

    def present_bit(self, operand: str) -> int:
        """Return the bit of an optional operand in `present`."""
        return 1 << self.optional.index(operand)

    def pack_settings(self, present: int, values: Mapping[str, float]) -> np.ndarray:
        """Return the operand of settings."""
        assert self.settings_layout is not None, f"{self.kind} has no settings"
        return self.settings_layout.pack({"present": present, **values})

    def setting_index(self, name: str) -> int:
        """Return where a setting stands in `pack_settings`."""
        assert self.settings_layout is not None, f"{self.kind} has no settings"
        return self.settings_layout.index(name)

    def variant(self, *parameters: Any) -> Variant:
        """One kernel of this kind, for a dtype's name and a head size, if it has them."""
        assert len(parameters) == len(self.parameters), f"{self.kind} takes {', '.join(self.parameters) or 'nothing'}"
        return Variant(self, **dict(zip(self.parameters, parameters, strict=True)))


class Variant(NamedTuple):
    """A kernel: its table, and what it is compiled for."""

    spec: KernelSpec
    dtype: str = ""
    head_dim: int = 0

    @property
    def name(self) -> str:
        """Its name for XLA and for the folder of object code; `kernel_table.identify` reads it."""
        return "_".join([self.spec.kind, *(str(getattr(self, parameter)) for parameter in self.spec.parameters)])

    def dtype_of(self, array: Operand | Result) -> str:
        """Return the dtype of an operand or result."""
        return array.dtype or self.dtype
