"""Pages that come and go through pinned memory of the host, as on accelerators: the same bytes, and the same tokens.

CPU devices have memory of that kind too, so the calls here are those that a GPU or TPU gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers import tiered
from helpers.driving import Driver, tiny_config, tiny_model
from helpers.fakes import DictTier
from helpers.thorough import by_default
from rekindle import Sampling
from rekindle._src.core.records import PageMove, StepPlan
from rekindle._src.execution.runner import Runner
from rekindle._src.programs import host_pages
from rekindle._src.programs import lattice as module
from rekindle._src.programs.buckets import SCATTER, Helper
from rekindle._src.programs.kv_layout import payload_layout
from rekindle._src.programs.programs import Programs

MODEL = tiny_model()
SIZES = 8, 4


@pytest.fixture(autouse=True)
def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "uses_pinned", lambda parts: True)
    monkeypatch.setattr(module, "moved_pages", lambda parts, kv: SIZES)
    monkeypatch.setattr(Programs, "moved_by_host", lambda programs, keys: False)


@pytest.fixture(params=by_default(["float32", "int8"]))
def driver(request: pytest.FixtureRequest, as_on_accelerators: None) -> Iterator[Driver]:
    config = tiny_config(max_model_len=256, device_pages=100, kv_dtype=request.param)
    runner = Runner(MODEL, config, host_tier=DictTier())
    yield Driver(runner)
    runner.close()


def test_pages_go_and_come_back_as_they_were(driver: Driver) -> None:
    prompt = np.random.default_rng(1).integers(3, 320, 120).tolist()
    live = driver.add(prompt, Sampling(max_tokens=1))
    for _ in range(3):
        driver.step([(live, 32)])
    moves = tuple(PageMove(int(page), bytes([index])) for index, page in enumerate(live.pages[:11]))
    runner = driver.runner
    runner.fetch(runner.dispatch(StepPlan(0, (), (), offload=moves)))
    kept = runner.read_pages([move.page for move in moves])
    places = [driver.free_pages.pop() for _ in moves]
    restore = tuple(PageMove(page, move.digest) for page, move in zip(places, moves, strict=True))
    runner.fetch(runner.dispatch(StepPlan(0, (), (), restore=restore[::-1])))
    for one, other in zip(kept, runner.read_pages(places), strict=True):
        for left, right in zip(one, other, strict=True):
            assert np.abs(left.astype(np.float32)).max() > 0
            np.testing.assert_array_equal(left, right)
    assert {key.name for key in runner.programs.ledger.entries if runner.programs.ready(key)} >= {"gather8", "scatter8"}
    assert runner.statistics().pages_out == runner.statistics().pages_in == 11


def test_a_gather_leaves_its_pages_in_pinned_memory(driver: Driver) -> None:
    calls = driver.runner.calls
    payload = calls.gather(np.arange(4, dtype=np.int32))
    assert {leaf.sharding.memory_kind for leaf in payload} == {host_pages.PINNED}
    arrays = driver.runner.programs.recipes.parts.to_host(payload)
    back = host_pages.begin_to_device(driver.runner.programs.recipes.parts, arrays)
    assert {leaf.sharding.memory_kind for leaf in back} <= {None, "device"}
    for left, right in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(left, np.asarray(right))


def test_a_transfer_is_one_operand_for_each_array_of_a_layer(driver: Driver) -> None:
    programs = driver.runner.programs
    arrays = len(payload_layout(programs.recipes.kv))
    for pages in SIZES:
        _, ids, payload = programs.recipes.recipe(Helper("scatter", pages)).arguments
        assert ids.shape == (pages,)
        assert [leaf.shape[0] for leaf in payload] == [pages] * arrays


def test_a_payload_has_every_page_in_its_place() -> None:
    pages = {place: (np.full((1, 2, 3), place, np.int8), np.full((1, 4), place, np.float32)) for place in (0, 5, 2)}
    first, second = host_pages.joined(pages, 7)
    assert (first.shape, first.dtype, second.shape, second.dtype) == ((7, 2, 3), np.int8, (7, 4), np.float32)
    assert first[:, 0, 0].tolist() == second[:, 0].tolist() == [0, 0, 2, 0, 0, 5, 0]


def test_on_a_cpu_pages_are_ordinary_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    runner = Runner(MODEL, tiny_config(), host_tier=DictTier())
    assert not runner.programs.recipes.pinned
    payload = runner.programs.recipes.recipe(SCATTER).arguments[2]
    assert len(payload) == SCATTER.pages, "a payload for each page, which XLA:CPU reads where it is"
    runner.close()


@pytest.mark.thorough
def test_sessions_over_tiers_give_what_the_plain_loop_gives(tmp_path: Path) -> None:
    for _ in range(2):  # the second one loads its programs
        with tiered.opened(tmp_path) as session:
            for index in (0, 1, 2, 3, 0, 2, 1, 3, 0):
                tiered.ask(session, index)
            stats = session.stats()
            assert stats.pages_out and stats.pages_in, "no page left the device and came back"
