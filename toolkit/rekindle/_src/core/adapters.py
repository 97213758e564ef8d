"""Adapters as the host sees them: what a request carries, and which units of the device's stacks an adapter has.

A unit holds `UNIT` rows of rank. An adapter takes as many units as its rank needs, and a slot, whose number tells its
tokens from others. Slot 0 means none.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

UNIT = 16  # rows of rank


class AdapterLike(Protocol):
    """An adapter's weights, in host memory."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str:
        """A digest of its weights."""
        ...

    @property
    def rank(self) -> int: ...


class AdapterLoad(NamedTuple):
    """An adapter that is put into a slot and units of the device before a step, in place of what was there."""

    slot: int
    units: tuple[int, ...]
    adapter: AdapterLike


def units_for(rank: int) -> int:
    """Return how many units an adapter of this rank needs."""
    return -(-rank // UNIT)
