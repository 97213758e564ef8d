"""Slots of adapters: any order of takes and leaves keeps each slot and unit with one owner, and evicts no used one."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.core.records import units_for
from rekindle._src.scheduling.admission import AdapterSlots


class Fake(NamedTuple):
    name: str
    digest: str
    rank: int


ADAPTERS = [Fake(str(index), str(index), rank) for index, rank in enumerate((1, 16, 17, 40, 64, 8))]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, len(ADAPTERS) - 1)), max_size=60))
def test_slots_and_units_have_one_owner(steps: list[tuple[bool, int]]) -> None:
    slots = AdapterSlots(3, 6)
    users: list[Fake] = []
    units: dict[int, str] = {}  # as the device has them
    for takes, index in steps:
        adapter = ADAPTERS[index]
        if takes and slots.fits(adapter):
            slots.take(adapter)
            users.append(adapter)
        elif not takes and adapter in users:
            slots.leave(adapter)
            users.remove(adapter)
        for load in slots.loads():
            assert len(load.units) == units_for(load.adapter.rank)
            units |= dict.fromkeys(load.units, load.adapter.digest)
        slots.check_integrity([*users])
        for user in users:
            assert sum(owner == user.digest for owner in units.values()) >= units_for(user.rank), "it lost its units"
    for user in users:
        slots.leave(user)
    assert all(slots.fits(adapter) for adapter in ADAPTERS)


def test_the_least_recently_used_one_makes_room() -> None:
    slots = AdapterSlots(2, 8)
    for index in (0, 1, 0):
        slots.take(ADAPTERS[index])
        slots.leave(ADAPTERS[index])
    slots.take(ADAPTERS[5])
    assert ADAPTERS[0] in slots and ADAPTERS[1] not in slots
