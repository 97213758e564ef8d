"""LLVM's bfloat, which llvmlite has no type for."""

from __future__ import annotations

from llvmlite import ir


class BFloat(ir.Type):
    """The type of a bfloat16."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)
