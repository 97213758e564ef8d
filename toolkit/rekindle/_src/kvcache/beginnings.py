"""Beginnings of pages: which page on the device begins as another one does, so that it can be copied for that one."""

from __future__ import annotations

import numpy as np

from rekindle._src.core.records import IntArray
from rekindle._src.kvcache.node import Node

SMALLEST_PAGE = 16  # tokens; of smaller pages no copy is worth its call


def least_copied(page_size: int) -> int:
    """Return how many tokens at the beginning of a page are worth a copy of it; 0 if none are."""
    return max(4, page_size // 8) if page_size >= SMALLEST_PAGE else 0


def common(one: IntArray, other: IntArray) -> int:
    """Return how many tokens at the beginning of both are the same."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


class Beginnings:
    """The page that was computed last, for each page before it and each `least` tokens at its beginning."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._nodes: dict[tuple[int, bytes], Node] = {}

    def add(self, node: Node, tokens: IntArray) -> None:
        """Note that the page of `node`, which has `tokens`, is on the device, and computed."""
        if self._least and node.parent is not None:
            self._nodes[node.parent.key, tokens[: self._least].tobytes()] = node

    def remove(self, node: Node, tokens: IntArray) -> None:
        """Forget a page that leaves the device."""
        if self._least and node.parent is not None:
            place = node.parent.key, tokens[: self._least].tobytes()
            if self._nodes.get(place) is node:
                del self._nodes[place]

    def find(self, key: int, tokens: IntArray) -> Node | None:
        """Return a page behind the one with this key that begins with the first of `tokens`."""
        return self._nodes.get((key, tokens[: self._least].tobytes())) if 0 < self._least <= len(tokens) else None

    def check_integrity(self) -> None:
        assert all(node.page for node in self._nodes.values()), "a page that left the device is offered for copies"
