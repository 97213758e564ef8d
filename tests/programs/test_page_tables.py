"""What a step is told of page tables that stay on the device: with it, they are those of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rekindle import Sampling
from rekindle._src.core.records import Request, Row
from rekindle._src.programs import packing
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.packing import Layout, SentTables, changed_tables
from rekindle._src.programs.partitioning import Partitioning

SLOTS, WIDTH, CHANGES = 5, 12, 6


def row(slot: int, pages: np.ndarray) -> Row:
    request = Request(f"r{slot}", np.arange(3, dtype=np.int32), Sampling())
    return Row(request, 0, slot, 5, 1, pages, None, True)


class Device:
    """The tables as the device's programs change them."""

    def __init__(self) -> None:
        self.sent, self.tables = SentTables(SLOTS, WIDTH), jnp.zeros((SLOTS + 1, WIDTH), jnp.int32)
        self.layout = Layout(2, 0, 0, WIDTH, SLOTS, CHANGES)
        self.changed = self.whole = 0

    def step(self, rows: Sequence[Row]) -> None:
        ints = np.full(self.layout.ints, 77, np.int32)  # what an earlier step left
        changes = ints[9 + 8 :][: 3 * CHANGES].reshape(3, CHANGES)
        ints[:1], ints[1:17] = 0, 0
        self.sent.write(rows, changes)
        self.changed, self.whole = int((changes[0] != SLOTS).sum()), len(self.sent.whole)
        for packed in self.sent.packed_whole(packing.PUT):
            self.tables = packing.put_tables(self.tables, jnp.asarray(packed))
        found = changed_tables(self.layout, jnp.asarray(ints), self.tables)
        assert found is not None
        self.tables = found
        self.sent.dispatched()

    def check(self, rows: Sequence[Row]) -> None:
        for each in rows:
            pages = each.pages[:WIDTH]
            np.testing.assert_array_equal(np.asarray(self.tables)[each.slot, : len(pages)], pages)
        assert not np.asarray(self.tables)[SLOTS].any(), "the scratch slot reads page 0"


def test_rows_of_any_history_find_their_pages() -> None:
    device, rng = Device(), np.random.default_rng(0)
    tables = [np.arange(1, 3, dtype=np.int32)] * SLOTS
    wholes = 0
    for _ in range(150):
        for slot in range(SLOTS):
            old, change = tables[slot], rng.random()
            if change < 0.4 and len(old) < WIDTH + 1:  # one page more, at last more than a table has
                tables[slot] = np.r_[old, rng.integers(1, 99)].astype(np.int32)
            elif change < 0.5:  # a shared page takes the place of one
                tables[slot] = old.copy()
                tables[slot][rng.integers(len(old))] = rng.integers(1, 99)
            elif change < 0.6:  # another request
                tables[slot] = rng.integers(1, 99, rng.integers(1, WIDTH + 1)).astype(np.int32)
        rows = [row(slot, tables[slot]) for slot in rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]]
        device.step(rows)
        device.check(rows)
        wholes += device.whole
    assert wholes, "no step had more changes than it can bring"


def test_a_table_that_did_not_change_is_not_sent_again() -> None:
    device, pages = Device(), np.array([4, 5], np.int32)
    device.step([row(1, pages)])
    assert device.changed == 2
    device.step([row(1, pages), row(1, pages)])
    assert device.changed == 0
    longer = np.array([4, 5, 6], np.int32)
    device.step([row(1, longer)])
    assert device.changed == 1
    device.check([row(1, longer)])


def test_a_step_that_was_not_dispatched_told_the_device_nothing() -> None:
    device, pages = Device(), np.array([4, 5], np.int32)
    device.sent.write([row(1, pages)], np.zeros((3, CHANGES), np.int32))
    device.step([row(1, pages)])
    assert device.changed == 2
    device.sent.forget()
    device.tables = jnp.zeros_like(device.tables)
    device.step([row(1, pages)])
    device.check([row(1, pages)])


def test_a_step_brings_few_integers_however_long_contexts_are() -> None:
    bucket = Bucket(256, 0)
    for width in (512, 8192):
        whole, some = (Layout.of(bucket, max_requests=256, width=width, resident=stays) for stays in (False, True))
        assert whole.ints > 256 * width
        assert some.ints < 4096


def test_tables_stay_on_accelerators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not packing.tables_stay(Partitioning())
    monkeypatch.setattr(packing, "current_platform", lambda: "gpu")
    assert packing.tables_stay(Partitioning())
    assert jax.default_backend() == "cpu"
