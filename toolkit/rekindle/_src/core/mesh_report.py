"""A session's report on the devices that share its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rekindle._src.core import html


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class MeshReport(html.Record):
    """The devices of a session with `mesh` and the share of each; `session.stats().mesh`."""

    axes: Mapping[str, int]  # devices by axis
    devices: tuple[str, ...]
    heads: int  # attention heads of each device
    kv_heads: int  # KV heads of each device
    kv_copies: int  # devices that have the same KV heads
    weight_bytes: int  # on each device
    page_bytes: int  # of a KV page, on each device
    sums: int  # in a step, over the devices of one model; its logits are gathered once more
    bytes_per_token: int  # added by every device to those sums for each token of a step
    processes: int = 1  # that own these devices in equal numbers

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def named(self) -> str:
        """The devices in a few words."""
        axes = " × ".join(f"{name} {count}" for name, count in self.axes.items())
        among = f" of {self.processes} processes" if self.processes > 1 else ""
        return f"{html.count(self.size, 'device')}{among} ({axes})"

    def __str__(self) -> str:
        shared = f", {self.kv_copies} with the same ones" if self.kv_copies > 1 else ""
        return (
            f"{self.named}: each has {html.count(self.heads, 'head')}, "
            f"{html.count(self.kv_heads, 'kv head')}{shared}, {self.weight_bytes / 2**20:,.1f} MiB of weights"
        )


def describe_share(figures: Mapping[str, Any]) -> str:
    """Return the collectives' share of a session's steps in words; empty if unknown."""
    share = figures.get("collective_share")
    return "" if share is None else f"{share:.0%} of the steps' time in collectives"
