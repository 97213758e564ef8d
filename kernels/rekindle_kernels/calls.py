"""Names that native/attention.py imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rekindle_kernels.ops.attention import AttentionCall as Call
from rekindle_kernels.pages import LayerKV

__all__ = ["Call", "Implementation", "LayerKV"]


class Implementation(NamedTuple):
    """What native/attention.py builds of its functions; native/implementations.py registers them."""

    name: str
    attention: Callable[..., Any]
    supports: Callable[[Call], str | None]
    write: Callable[..., LayerKV] | None = None
