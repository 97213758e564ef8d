"""The names under which native/attention.py knows attention's records, until it takes `AttentionInputs` itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rekindle_kernels.ops.attention import AttentionCall as Call
from rekindle_kernels.pages import LayerKV

__all__ = ["Call", "Implementation", "LayerKV"]


class Implementation(NamedTuple):
    """What native/attention.py registers: `implementations.py` in that folder reads its functions instead."""

    name: str
    attention: Callable[..., Any]
    supports: Callable[[Call], str | None]
    write: Callable[..., LayerKV] | None = None
