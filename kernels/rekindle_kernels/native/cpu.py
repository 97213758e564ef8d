"""What this processor can do, as LLVM sees it."""

from __future__ import annotations

from functools import cache


@cache
def has_feature(name: str) -> bool:
    """Whether this processor has the instructions that LLVM calls `name`."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get(name, False))
