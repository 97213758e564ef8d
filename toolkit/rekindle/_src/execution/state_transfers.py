"""Copies of sequences' states between the device and the tiers below it, one state in each transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rekindle._src.core.records import LostPage, PageMove
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.execution.page_transfers import PayloadStore
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.kv_layout import state_bytes
from rekindle.errors import StoreError

LeavingStates = list[tuple[PageMove, Any]]  # read out, and not yet on the host


class StateTransfers:
    """Reads states out of the device and fills them from the host. A payload is one array, float32 [1, numbers]."""

    def __init__(self, calls: DeviceCalls, store: PayloadStore | None) -> None:
        self._calls, self._store = calls, store
        self._parts = calls.programs.parts
        self._shape = 1, state_bytes(calls.programs.model) // 4

    def read_out(self, moves: Sequence[PageMove]) -> LeavingStates:
        """Begin to copy states out of the device, before a later step may overwrite them."""
        return [(move, self._calls.state_out(move.page)) for move in moves]

    def store(self, leaving: LeavingStates) -> None:
        """Hand the states that were read out to the host tier; waits for the copies."""
        for move, states in leaving:
            assert self._store is not None, "a state was offloaded without a host tier"
            self._calls.arrive(states)
            self._store.put(move.digest, (self._parts.states_to_host(states),))

    def restore(self, moves: Sequence[PageMove]) -> tuple[LostPage, ...]:
        """Fill slots from the host tier; returns those whose payload is missing or does not fit."""
        lost: list[LostPage] = []
        for move in moves:
            try:
                self._calls.state_in(move.page, self._parts.states_to_device(self._payload(move)))
            except Exception as error:
                lost.append(LostPage(move, error))
        return tuple(lost)

    def read(self, slots: Sequence[int]) -> list[paged.Payload]:
        """Return the states in slots; called between steps."""
        return [(self._parts.states_to_host(self._calls.state_out(slot)),) for slot in slots]

    def _payload(self, move: PageMove) -> np.ndarray:
        assert self._store is not None, "a state is restored without a host tier"
        try:
            (states,) = self._store.get(move.digest)
        except KeyError:
            raise StoreError(
                f"state {move.digest.hex()} left the host tier before it was restored. Raise host_memory"
            ) from None
        if (states.shape, states.dtype) != (self._shape, np.float32):
            raise StoreError(
                f"state {move.digest.hex()} is {states.dtype}{list(states.shape)}, this session's states are "
                f"float32{list(self._shape)}. Submit the request again; the prompt is computed then"
            )
        array: np.ndarray = states
        return array
