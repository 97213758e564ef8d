"""Other weights for a fleet: one replica after another takes them, streams go on, and what does not fit is refused."""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from helpers.fakes import FakeModel
from helpers.fleets import local_fleet
from helpers.sessions import CONFIG, engine_of, eventually, fake_session
from rekindle import CheckpointError, ConfigError, Fleet, InvalidRequest, ReplicaLost, SessionClosed
from rekindle._src.dispatch.device import Device
from rekindle._src.session.session import Session

pytestmark = pytest.mark.anyio


class Swapping(Device):
    has_weights = True

    def __init__(self, swap: Callable[[str], bytes]) -> None:
        self.swap = swap  # type: ignore[method-assign]


class Swaps:
    """Makes sessions whose weights are names, and counts what is swapped."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.names: Counter[str] = Counter()
        self.most = 0  # at once
        self._now = 0
        self._seconds = seconds
        self._lock = threading.Lock()

    def session(self) -> Session:
        session = fake_session(CONFIG, step_seconds=0.002)
        runner: Any = engine_of(session).runner

        def swap(name: str) -> bytes:
            if name == "broken":
                raise CheckpointError("no weights are there. Look into the folder")
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
                self.names[name] += 1
            time.sleep(self._seconds)
            runner.model = FakeModel(salt=zlib.crc32(name.encode()))
            with self._lock:
                self._now -= 1
            return name.encode()

        engine_of(session).device = Swapping(swap)
        return session


def text(prompt: str, weights: str = "", tokens: int = 30) -> str:
    """What one session gives with these weights."""
    session = Swaps().session()
    try:
        if weights:
            session.swap_weights(weights).result_sync()
        return session.generate_sync(prompt, max_tokens=tokens).text
    finally:
        session.close()


def weights_of(fleet: Fleet) -> list[str]:
    return [one.weights for one in fleet.stats().replicas]


async def ready(fleet: Fleet, count: int) -> None:
    await anyio.to_thread.run_sync(lambda: eventually(lambda: fleet.stats().ready == count))


async def test_one_replica_after_another_while_streams_go_on() -> None:
    swaps = Swaps(0.05)
    with local_fleet(swaps.session, replicas=3, router="shortest") as (fleet, _):
        handles = [fleet.submit(f"{number} Once upon a time", max_tokens=200) for number in range(6)]
        await aiter(handles[-1]).__anext__()
        await fleet.swap_weights("other", drain=0)
        assert (swaps.most, swaps.names) == (1, {"other": 3})
        assert weights_of(fleet) == ["other"] * 3
        for handle in handles:
            assert len((await handle).token_ids) == 200
        stats = fleet.stats()
        assert stats.lost == 0 and stats.moved >= 2
        assert (await fleet.generate("Once", max_tokens=30)).text == text("Once", "other") != text("Once")


@pytest.mark.thorough
async def test_requests_may_end_with_the_weights_that_they_began_with() -> None:
    with local_fleet(Swaps().session, router="shortest") as (fleet, _):
        handles = [fleet.submit(f"{number} Once", max_tokens=60) for number in range(4)]
        await aiter(handles[-1]).__anext__()
        await fleet.swap_weights("other", drain=20)
        assert fleet.stats().moved == 0
        for number, handle in enumerate(handles):
            assert (await handle).text == text(f"{number} Once", tokens=60)


async def test_the_only_replica_goes_on_in_its_place() -> None:
    with local_fleet(Swaps().session, replicas=1) as (fleet, _):
        handle = fleet.submit("Once upon a time", max_tokens=200)
        await aiter(handle).__anext__()
        await fleet.swap_weights("other", drain=60)
        assert not handle.done
        assert len((await handle).token_ids) == 200
        assert fleet.explain(handle).moves == 0


async def test_what_the_first_replica_can_not_take_is_refused() -> None:
    with local_fleet(Swaps().session) as (fleet, _):
        with pytest.raises(CheckpointError, match="no weights"):
            await fleet.swap_weights("broken")
        assert weights_of(fleet) == ["", ""]
        assert (await fleet.generate("Once", max_tokens=30)).text == text("Once")
        with pytest.raises(InvalidRequest, match="the replicas are others"):
            fleet.swap_weights({"layers.0": 1})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="drain"):
            fleet.swap_weights("other", drain=-1)


async def test_the_same_folder_may_hold_other_weights() -> None:
    swaps = Swaps()
    with local_fleet(swaps.session) as (fleet, _):
        await fleet.swap_weights("other")
        await fleet.swap_weights("other")
        assert swaps.names == {"other": 4}


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_new_replicas_have_the_weights() -> None:
    with local_fleet(Swaps().session) as (fleet, replicas):
        await fleet.swap_weights("other")
        replicas[0].die()
        await fleet.scale(3)
        await anyio.to_thread.run_sync(lambda: eventually(lambda: replicas[0].lives == 2))
        await ready(fleet, 3)
        assert weights_of(fleet) == ["other"] * 3
        for replica in replicas:
            assert replica.session is not None
            assert replica.session.generate_sync("Once", max_tokens=30).text == text("Once", "other")


async def test_a_replica_that_dies_meanwhile_takes_them_later() -> None:
    with local_fleet(Swaps().session) as (fleet, replicas):
        replicas[0].fragile = 1
        with anyio.fail_after(30):
            await fleet.swap_weights("other")
        await ready(fleet, 2)
        assert weights_of(fleet) == ["other"] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_weights_that_kill_every_replica_are_given_up() -> None:
    with local_fleet(Swaps().session) as (fleet, replicas):
        for replica in replicas:
            replica.fragile = 100
        with anyio.fail_after(30), pytest.raises(ReplicaLost, match="3 replicas died while they took the weights"):
            await fleet.swap_weights("other")
        await ready(fleet, 2)
        assert (await fleet.generate("Once", max_tokens=30)).text == text("Once")


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_single_replica_that_can_not_take_them_is_given_up() -> None:
    with local_fleet(Swaps().session) as (fleet, replicas):
        replicas[1].refuses = OSError("no such disk")
        with anyio.fail_after(30):
            await fleet.swap_weights("other")
        states = {one.name: (one.state, one.weights) for one in fleet.stats().replicas}
        assert states["local-0"] == ("ready", "other") and states["local-1"][0] == "failed"
        assert replicas[1].killed >= 1
        assert (await fleet.generate("Once", max_tokens=30)).text == text("Once", "other")


async def test_closing_ends_a_swap() -> None:
    with local_fleet(Swaps().session) as (fleet, _):
        handle = fleet.submit("Once upon a time", max_tokens=400)
        await aiter(handle).__anext__()
        ended: list[BaseException] = []

        async def swap() -> None:
            try:
                await fleet.swap_weights("other", drain=60)
            except SessionClosed as error:
                ended.append(error)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(swap)
                await anyio.to_thread.run_sync(lambda: eventually(lambda: swapping(fleet)))
                await fleet.aclose()
        assert len(ended) == 1


def swapping(fleet: Fleet) -> bool:
    return any(one.state == "swapping" for one in fleet.stats().replicas)
