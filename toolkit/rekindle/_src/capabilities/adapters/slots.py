"""The room of adapters on the device: slots, and units of rank."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from rekindle._src.capabilities.adapters.request import AdapterLike, AdapterUse
from rekindle._src.core.extension import DeviceLoad, Extensions
from rekindle._src.scheduling.admission import DeviceRoom

UNIT = 16  # rows of an adapter's rank


def units_for(rank: int) -> int:
    """Return how many units an adapter of this rank needs."""
    return -(-rank // UNIT)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterLoad(DeviceLoad):
    """An adapter that is put into a slot and units of the device before a step, in place of their content.

    It takes as many units of `UNIT` rows as its rank needs. The slot's number tells its tokens from others; slot 0
    means none.
    """

    slot: int
    units: tuple[int, ...]
    adapter: AdapterLike


@dataclasses.dataclass(slots=True)
class _LoadedAdapter:
    slot: int
    units: tuple[int, ...]
    users: int = 0  # sequences that run with it, or are leaving


class AdapterSlots(DeviceRoom):
    """The slots of adapters on the device: tracks which are loaded, which have running requests, and which makes room.

    An adapter with running requests stays; the least recently used of the others makes room for a new one. Loads are
    planned in the order of the steps, so a step always has the adapters that the plans before it left on the device.
    """

    def __init__(self, slots: int, units: int) -> None:
        self.slots, self.units = slots, units
        self._free_slots = list(range(slots, 0, -1))
        self._free_units = list(range(units - 1, -1, -1))
        self._places: OrderedDict[str, _LoadedAdapter] = OrderedDict()  # by digest, the least recently used first
        self._loads: list[AdapterLoad] = []
        self.loaded = self.evicted = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, adapter: AdapterLike) -> bool:
        return adapter.digest in self._places

    def concerns(self, wanted: Extensions) -> bool:
        return AdapterUse in wanted

    def fits(self, wanted: Extensions) -> bool:
        adapter = wanted[AdapterUse].adapter
        if adapter.digest in self._places:
            return True
        idle = [place for place in self._places.values() if not place.users]
        slots = len(self._free_slots) + len(idle)
        units = len(self._free_units) + sum(len(place.units) for place in idle)
        return slots > 0 and units >= units_for(adapter.rank)

    def shortage(self, wanted: Extensions) -> str:
        running = sum(place.users > 0 for place in self._places.values())
        return f"the adapter {wanted[AdapterUse].adapter.name!r}: requests of {running} others are running"

    def take(self, wanted: Extensions) -> None:
        """Count one more sequence that uses an adapter, which is put on the device if it is not there."""
        use = wanted.get(AdapterUse)
        if use is None:
            return
        adapter = use.adapter
        place = self._places.get(adapter.digest)
        if place is None:
            place = self._places[adapter.digest] = self._room(units_for(adapter.rank))
            self._loads.append(AdapterLoad(place.slot, place.units, adapter))
            self.loaded += 1
        place.users += 1
        self._places.move_to_end(adapter.digest)

    def leave(self, wanted: Extensions) -> None:
        """Undo one `take`; the adapter stays until its room is needed."""
        use = wanted.get(AdapterUse)
        if use is not None:
            self._places[use.adapter.digest].users -= 1

    def loads(self) -> tuple[AdapterLoad, ...]:
        if not self._loads:
            return ()
        loads = tuple(self._loads)
        self._loads.clear()
        return loads

    def check_integrity(self, users: list[Extensions]) -> None:
        """Raise AssertionError unless each slot and unit has one owner and the counts match `users`."""
        places = self._places.values()
        slots = sorted([*self._free_slots, *(place.slot for place in places)])
        assert slots == list(range(1, self.slots + 1)), f"slots of adapters drifted: {slots}"
        units = sorted([*self._free_units, *(unit for place in places for unit in place.units)])
        assert units == list(range(self.units)), f"units of adapters drifted: {units}"
        counts = dict.fromkeys(self._places, 0)
        for wanted in users:
            if AdapterUse in wanted:
                counts[wanted[AdapterUse].adapter.digest] += 1
        assert counts == {digest: place.users for digest, place in self._places.items()}, "users of adapters drifted"

    def _room(self, units: int) -> _LoadedAdapter:
        idle = [digest for digest, place in self._places.items() if not place.users]
        while not self._free_slots or len(self._free_units) < units:
            place = self._places.pop(idle.pop(0))
            self._free_slots.append(place.slot)
            self._free_units += sorted(place.units, reverse=True)
            self._free_units.sort(reverse=True)  # the first units are taken first, so that few chunks are in use
            self.evicted += 1
        return _LoadedAdapter(self._free_slots.pop(), tuple(self._free_units.pop() for _ in range(units)))
