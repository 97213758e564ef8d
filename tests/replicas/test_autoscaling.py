"""The number of replicas follows the load: quickly to more, slowly to fewer."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

import rekindle
from helpers.fleets import local_fleet
from helpers.sessions import CONFIG, eventually, fake_session
from rekindle import ConfigError
from rekindle._src.cli.main import parser
from rekindle._src.replicas import fleet_backend
from rekindle._src.replicas.autoscaling import Autoscaler, FleetLoad, Range, Room, replicas_for

ROOM = Room(sequences=8, tokens=64)


def test_what_a_load_asks_for() -> None:
    assert replicas_for(FleetLoad(0, 0), ROOM) == 1
    assert replicas_for(FleetLoad(6, 0), ROOM) == 1
    assert replicas_for(FleetLoad(7, 0), ROOM) == 2  # three quarters of eight rows are six
    assert replicas_for(FleetLoad(2, 512), ROOM) == 1
    assert replicas_for(FleetLoad(2, 513), ROOM) == 2  # eight steps of 64 tokens
    assert replicas_for(FleetLoad(60, 513), ROOM) == 10


def test_more_at_once_fewer_after_a_while() -> None:
    scaler = Autoscaler(Range(1, 4), more=2.0, fewer=10.0)
    assert scaler.look(0.0, 3, 1) == 1  # for a moment only
    assert scaler.look(1.0, 3, 1) == 1
    assert scaler.look(2.0, 9, 1) == 3  # for two seconds at least three
    assert scaler.look(3.0, 9, 3) == 3
    assert scaler.look(4.0, 9, 3) == 4  # nine, but four may be
    for at in range(5, 14):
        assert scaler.look(float(at), 1, 4) == 4
    assert scaler.look(14.0, 2, 4) == 4  # ten seconds ago it asked for nine
    assert scaler.look(15.0, 1, 4) == 2
    assert scaler.look(26.0, 1, 2) == 1


def test_a_load_that_comes_and_goes_changes_nothing() -> None:
    scaler = Autoscaler(Range(1, 4), more=2.0, fewer=10.0)
    for at in range(100):
        assert scaler.look(float(at), 3 if at % 2 else 1, 1) == 1
    scaler = Autoscaler(Range(1, 4), more=2.0, fewer=10.0)
    for at in range(100):
        assert scaler.look(float(at), 3 if at % 5 == 0 else 1, 3) == 3


def test_the_range_is_kept() -> None:
    scaler = Autoscaler(Range(2, 3))
    assert scaler.look(0.0, 1, 1) == 2
    assert scaler.look(1.0, 1, 7) == 3


def test_ranges_are_checked() -> None:
    assert Range.of(2) == Range(2, 2) and Range.of((1, 4)) == Range(1, 4)
    wrong: tuple[Any, ...] = (0, True, (4, 1), (0, 2), (1, 2, 3), (1, "4"), "1-4")
    for value in wrong:
        with pytest.raises(ConfigError, match="replicas"):
            Range.of(value)
    with pytest.raises(ConfigError, match="replicas"):
        rekindle.fleet(replicas=(4, 1))
    with pytest.raises(ConfigError, match="roles"):
        rekindle.fleet(replicas=(1, 4), roles={"prefill": 1, "decode": 1})


def test_a_range_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert parser().parse_args(["serve", "--replicas", "1-4"]).replicas == (1, 4)
    assert parser().parse_args(["serve", "--replicas", "2"]).replicas == 2
    for wrong in ("4-1", "0", "1-2-3", "many"):
        with pytest.raises(SystemExit):
            parser().parse_args(["serve", "--replicas", wrong])
        assert "neither a number above 0 nor a range" in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_backend, "Autoscaler", partial(Autoscaler, more=0.05, fewer=0.5))
    monkeypatch.setattr(fleet_backend, "LOOK", 0.02)


def slow_session() -> Any:
    return fake_session(CONFIG, step_seconds=0.002)


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_a_fleet_grows_under_a_load_and_shrinks_after_it(quick: None) -> None:
    with local_fleet(slow_session, replicas=1, size=Range(1, 3)) as (fleet, replicas):
        places = fleet.stats().places
        handles = [fleet.submit(f"{number} Once upon a time", max_tokens=300) for number in range(24)]
        await anyio.to_thread.run_sync(lambda: eventually(lambda: fleet.stats().ready == 3))
        for handle in handles:
            assert len((await handle).token_ids) == 300
        stats = fleet.stats()
        assert stats.follows == (1, 3) and "1 to 3 as the load asks for" in stats._repr_html_()
        assert {fleet.explain(handle).replica for handle in handles} == {"local-0", "local-1", "local-2"}
        await anyio.to_thread.run_sync(lambda: eventually(lambda: len(fleet.stats().replicas) == 1))
        assert (fleet.stats().lost, fleet.stats().moved, fleet.stats().places) == (0, 0, places)
        assert [replica.closed for replica in replicas] == [False, True, True]


@pytest.mark.anyio
async def test_scale_sets_a_range_or_a_number(quick: None) -> None:
    with local_fleet(slow_session, replicas=2) as (fleet, _):
        assert fleet.stats().follows is None
        await fleet.scale((1, 2))
        assert fleet.stats().follows == (1, 2)
        await anyio.to_thread.run_sync(lambda: eventually(lambda: len(fleet.stats().replicas) == 1))
        await fleet.scale(2)
        await anyio.sleep(0.8)
        stats = fleet.stats()
        assert stats.follows is None and len(stats.replicas) == 2
    roles = local_fleet(slow_session, roles={"prefill": 1, "decode": 1})
    with roles as (fleet, _), pytest.raises(ConfigError, match="roles"):
        fleet.scale((2, 4))
