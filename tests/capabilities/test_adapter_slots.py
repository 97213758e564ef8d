"""Slots of adapters: any order of takes and leaves keeps each slot and unit with one owner, and evicts no used one."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.capabilities.adapters.request import AdapterUse
from rekindle._src.capabilities.adapters.slots import AdapterSlots, units_for
from rekindle._src.core.extension import Extensions


class Fake(NamedTuple):
    name: str
    digest: str
    rank: int


ADAPTERS = [Fake(str(index), str(index), rank) for index, rank in enumerate((1, 16, 17, 40, 64, 8))]
USES = [Extensions(AdapterUse(adapter, (adapter.digest,))) for adapter in ADAPTERS]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, len(ADAPTERS) - 1)), max_size=60))
def test_slots_and_units_have_one_owner(steps: list[tuple[bool, int]]) -> None:
    slots = AdapterSlots(3, 6)
    users: list[Fake] = []
    units: dict[int, str] = {}  # as the device has them
    for takes, index in steps:
        adapter, wanted = ADAPTERS[index], USES[index]
        if takes and slots.fits(wanted):
            slots.take(wanted)
            users.append(adapter)
        elif not takes and adapter in users:
            slots.leave(wanted)
            users.remove(adapter)
        for load in slots.loads():
            assert len(load.units) == units_for(load.adapter.rank)
            units |= dict.fromkeys(load.units, load.adapter.digest)
        slots.check_integrity([USES[ADAPTERS.index(user)] for user in users])
        for user in users:
            assert sum(owner == user.digest for owner in units.values()) >= units_for(user.rank), "it lost its units"
    for user in users:
        slots.leave(USES[ADAPTERS.index(user)])
    assert all(map(slots.fits, USES))


def test_the_least_recently_used_one_makes_room() -> None:
    slots = AdapterSlots(2, 8)
    for index in (0, 1, 0):
        slots.take(USES[index])
        slots.leave(USES[index])
    slots.take(USES[5])
    assert ADAPTERS[0] in slots and ADAPTERS[1] not in slots
