"""The layouts of a program's operands and results on the devices of a mesh.

    WEIGHTS   the leaves of the model, each by its role
    PAGES     KV pages (a pytree of them), divided by kv heads
    PAYLOAD   pages in transfers to or from the host, divided by kv heads
    ROWS      uploads, request state, masks, tokens and all else of rows or slots: the same on every device,
              and with several data shards one part for each of them along the first axis
    POOLED    the same with the parts along the second axis
    HEADS     heads of attention by rows, [rows, heads, …]: divided by heads, and rows as in ROWS
    WHOLE     the same on every device
    PARTS     different on each of the devices that share a model, along an axis of its own in front

The layout of an operand may be a tree of these.
"""

from __future__ import annotations

import enum


class DeviceLayout(enum.Enum):
    """The layout of an operand or a result on the devices of a mesh."""

    WEIGHTS = enum.auto()
    PAGES = enum.auto()
    PAYLOAD = enum.auto()
    ROWS = enum.auto()
    POOLED = enum.auto()
    HEADS = enum.auto()
    WHOLE = enum.auto()
    PARTS = enum.auto()


WEIGHTS, PAGES, PAYLOAD = DeviceLayout.WEIGHTS, DeviceLayout.PAGES, DeviceLayout.PAYLOAD
ROWS, POOLED, HEADS = DeviceLayout.ROWS, DeviceLayout.POOLED, DeviceLayout.HEADS
WHOLE, PARTS = DeviceLayout.WHOLE, DeviceLayout.PARTS
