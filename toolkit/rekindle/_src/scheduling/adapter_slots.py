"""The slots of adapters on the device: which adapters are there, whose requests run, and which one makes room.

Pure host state, with the scheduler as its owner. An adapter whose requests run stays; of the others the one that was
used least recently makes room for a new one. Loads are planned in the order of the steps, so a step always has the
adapters that the plans before it left on the device.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from rekindle._src.core.records import AdapterLike, AdapterLoad, units_for


@dataclasses.dataclass(slots=True)
class _Place:
    slot: int
    units: tuple[int, ...]
    users: int = 0  # sequences that run with it, or are leaving


class AdapterSlots:
    """Counts the sequences that use each adapter. `slots` 0 is a session without adapters."""

    def __init__(self, slots: int = 0, units: int = 0) -> None:
        self.slots, self.units = slots, units
        self._free_slots = list(range(slots, 0, -1))
        self._free_units = list(range(units - 1, -1, -1))
        self._places: OrderedDict[str, _Place] = OrderedDict()  # by digest, the least recently used first
        self._loads: list[AdapterLoad] = []
        self.loaded = self.evicted = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, adapter: AdapterLike) -> bool:
        return adapter.digest in self._places

    @property
    def in_use(self) -> int:
        """The number of adapters whose requests run."""
        return sum(place.users > 0 for place in self._places.values())

    def fits(self, adapter: AdapterLike) -> bool:
        """True if `take` would succeed now."""
        if adapter.digest in self._places:
            return True
        idle = [place for place in self._places.values() if not place.users]
        slots = len(self._free_slots) + len(idle)
        units = len(self._free_units) + sum(len(place.units) for place in idle)
        return slots > 0 and units >= units_for(adapter.rank)

    def take(self, adapter: AdapterLike) -> None:
        """Count one more sequence that uses an adapter, which is put on the device if it is not there."""
        place = self._places.get(adapter.digest)
        if place is None:
            place = self._places[adapter.digest] = self._room(units_for(adapter.rank))
            self._loads.append(AdapterLoad(place.slot, place.units, adapter))
            self.loaded += 1
        place.users += 1
        self._places.move_to_end(adapter.digest)

    def leave(self, adapter: AdapterLike) -> None:
        """Undo one `take`; the adapter stays until its room is needed."""
        self._places[adapter.digest].users -= 1

    def loads(self) -> tuple[AdapterLoad, ...]:
        """Take out the loads of the step being planned."""
        if not self._loads:
            return ()
        loads = tuple(self._loads)
        self._loads.clear()
        return loads

    def check_integrity(self, users: list[AdapterLike]) -> None:
        """Raise AssertionError unless each slot and unit has one owner and the counts are those of `users`."""
        places = self._places.values()
        slots = sorted([*self._free_slots, *(place.slot for place in places)])
        assert slots == list(range(1, self.slots + 1)), f"slots of adapters drifted: {slots}"
        units = sorted([*self._free_units, *(unit for place in places for unit in place.units)])
        assert units == list(range(self.units)), f"units of adapters drifted: {units}"
        counts = dict.fromkeys(self._places, 0)
        for adapter in users:
            counts[adapter.digest] += 1
        assert counts == {digest: place.users for digest, place in self._places.items()}, "users of adapters drifted"

    def _room(self, units: int) -> _Place:
        idle = [digest for digest, place in self._places.items() if not place.users]
        while not self._free_slots or len(self._free_units) < units:
            place = self._places.pop(idle.pop(0))
            self._free_slots.append(place.slot)
            self._free_units += sorted(place.units, reverse=True)
            self._free_units.sort(reverse=True)  # the first units are taken first, so that few chunks are in use
            self.evicted += 1
        return _Place(self._free_slots.pop(), tuple(self._free_units.pop() for _ in range(units)))
