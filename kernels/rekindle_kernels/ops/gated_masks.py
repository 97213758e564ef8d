"""Masks that the host writes while the program that reads them runs; see `rekindle_kernels.native.mask_gate`."""

from __future__ import annotations

import jax

from rekindle_kernels import native
from rekindle_kernels.ops.registry import current_platform


def has_mask_gates(implementation: str | None = None, *, platform: str | None = None) -> bool:
    """True if `gated_masks` can be called in programs whose operations run with `implementation`."""
    supported = implementation in (None, "native") and (platform or current_platform()) == "cpu"
    return supported and native.unavailable_reason() is None and native.has_gates()


def gated_masks(address: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the masks int32 [N, mask_words(V)] of the `MaskGate` with this address int32 [2], once it is open.

    The program does not wait before logits [N, V] are computed. Where the gate stays closed, all bits are 0.
    """
    return native.gated_masks(address, logits)
