"""The states of one running sequence: the slots that it reads and writes, and where it leaves some for the tree."""

from __future__ import annotations

from collections import deque

from rekindle._src.kvcache.node import Node


class StateTrail:
    """The states of one running sequence."""

    __slots__ = ("again", "held", "left", "pending", "reads", "source", "stops")

    def __init__(self) -> None:
        self.reads = 0  # the slot of its state, once a row was planned
        self.held = 0  # the tree's slot that its next row reads
        self.stops: list[int] = []  # positions of the prompt at which to leave a state, ascending
        self.pending: deque[tuple[int, int]] = deque()  # positions and slots of states left by steps in flight
        self.left: tuple[Node, int] | None = None  # the node of the last state of its own text, and that node's visits
        self.source = ""  # where the state came from that it continued
        self.again = 0  # cached tokens that it computes again, since no state was there
