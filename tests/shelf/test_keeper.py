"""The owner of a shelf's models over fakes: lines, failures, cancellations, the end. Nothing here looks at a clock."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from helpers.sessions import eventually
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle._src.shelf import keeper as keepers
from rekindle._src.shelf.keeper import Keeper, Lease
from rekindle._src.shelf.policy import ModelState, ShelfLimits
from rekindle.errors import Busy, CheckpointError, InvalidRequest, OutOfMemory, QueueFull, RequestAborted, SessionClosed

pytestmark = pytest.mark.anyio
ONE = ShelfLimits(max_loaded=1)


class Gate:
    """A step of a model that a test lets happen; open from the beginning."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.event.set()

    async def passed(self) -> None:
        while not self.event.is_set():  # noqa: ASYNC110 (another thread decides)
            await anyio.sleep(0.002)


class FakeModel:
    """A model that keeps a record of what became of it, and checks its keeper."""

    def __init__(self, name: str, held: dict[str, int], size: int = 10) -> None:
        self.name, self.size, self.held = name, size, held
        self.session: Any = None
        self.log: list[str] = []
        self.gate = Gate()
        self.live = self.admitted = 0
        self.ended = False
        self.progress = ""
        self.failure: Exception | None = None
        self.on_request: Callable[[], object] | None = None
        self.on_wait: Callable[[], object] = str
        self.begins = 0  # how often something begins to use it just before it would sleep
        self.threads: set[int] = set()

    def plan(self, memory: int | None) -> int:
        return self.size

    async def _take(self, what: str) -> None:
        self.threads.add(threading.get_ident())
        self.log.append(what)
        await self.gate.passed()
        if self.failure is not None:
            raise self.failure
        self.held[self.name] = self.size

    async def open(self) -> None:
        await self._take("open")
        self.session = f"session of {self.name}"

    async def wake(self) -> None:
        await self._take("wake")

    async def sleep(self, on_request: Callable[[], object], on_wait: Callable[[], object]) -> None:
        assert not self.live, "it is in use"
        if self.begins > 0:
            self.begins -= 1
            raise Busy("a training has begun", 1.0)
        self.log.append("sleep")
        self.on_request, self.on_wait = on_request, on_wait
        self.held.pop(self.name, None)

    async def close(self) -> None:
        if self.session is not None:
            self.log.append("close")
        self.session, self.ended = None, False
        self.held.pop(self.name, None)


class Fakes:
    """A keeper over fakes."""

    def __init__(self, names: str = "abc", limits: ShelfLimits = ONE) -> None:
        self.held: dict[str, int] = {}
        self.models = {name: FakeModel(name, self.held) for name in names}
        self.keeper = Keeper(self.models, limits)

    def __getitem__(self, name: str) -> FakeModel:
        return self.models[name]

    def state(self, name: str) -> ModelState:
        return self.keeper.entries[name].row.state

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Lease]:
        lease = await self.keeper.lease(name)
        try:
            assert lease.session == f"session of {name}" and name in self.held
            yield lease
        finally:
            lease.release()


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    made = Fakes()
    yield made
    made.keeper.close()
    eventually(lambda: made.keeper.ended.filled)
    made.keeper.join(20.0)
    assert not made.held and all(not entry.leases for entry in made.keeper.entries.values())
    assert not [thread for thread in threading.enumerate() if thread.name == "rekindle shelf"]


async def test_models_are_loaded_at_first_use_and_sleep_for_each_other(fakes: Fakes) -> None:
    for name in "abab":
        async with fakes.use(name):
            assert fakes.held == {name: 10}
    assert (fakes["a"].log, fakes["b"].log) == (["open", "sleep", "wake", "sleep"], ["open", "sleep", "wake"])
    assert fakes["c"].log == [] and fakes.state("a") is ModelState.SLEEPING
    await fakes.keeper.unload("a")
    await fakes.keeper.unload("c")
    assert fakes.state("a") is ModelState.UNLOADED and fakes["a"].log[-1] == "close"
    assert len(fakes["a"].threads | fakes["b"].threads) == 1, "one thread makes all changes"


async def test_a_client_that_unloads_a_model_in_use_keeps_nobody_out(fakes: Fakes) -> None:
    """One client's long text and its wish to unload the model would make all others wait for the end of the text."""
    row = fakes.keeper.entries["a"].row
    async with anyio.create_task_group() as group:
        async with fakes.use("a"):
            group.start_soon(partial(fakes.keeper.unload, "a", stay=True))
            while row.leaves_at is None:
                await anyio.lowlevel.checkpoint()
            other = fakes.keeper.lease_now("a")
            assert other is not None, "it is loaded"
        assert fakes.state("a") is ModelState.LOADED
        other.release()
    assert fakes["a"].log == ["open", "close"] and row.leaves_at is None
    # It stays as long as its loading took, also when nobody uses it.
    async with fakes.use("a"), anyio.create_task_group() as group:
        row.seconds = 30.0
        group.start_soon(partial(fakes.keeper.unload, "a", stay=True))
        while row.leaves_at is None:
            await anyio.lowlevel.checkpoint()
        assert row.leaves_at == row.stays_until > fakes.keeper.clock()
        group.cancel_scope.cancel()
    row.seconds = 0.0
    # The owner's wish counts at once; withdrawn, the door opens again, also if a client still waits.
    async with fakes.use("a"), anyio.create_task_group() as group:
        group.start_soon(partial(fakes.keeper.unload, "a", stay=True))
        with anyio.CancelScope() as owner:
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(fakes.keeper.unload, "a")
                while not row.shut:
                    await anyio.lowlevel.checkpoint()
                assert fakes.keeper.lease_now("a") is None
                owner.cancel()
        another = fakes.keeper.lease_now("a")
        assert another is not None and row.leaves_at is not None
        another.release()
        group.cancel_scope.cancel()
    assert not row.shut and row.leaves_at is None


async def test_many_wait_for_one_loading_and_one_that_leaves_takes_nothing_with_it(fakes: Fakes) -> None:
    fakes["a"].gate.event.clear()
    done: list[str] = []

    async def ask() -> None:
        async with fakes.use("a"):
            done.append("a")

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as leaves:
            async with anyio.create_task_group() as first:
                first.start_soon(ask)
                while not fakes["a"].log:  # noqa: ASYNC110 (another thread decides)
                    await anyio.sleep(0.002)
                for _ in range(20):
                    group.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                leaves.cancel()
        assert not done and fakes.keeper.entries["a"].line
        fakes["a"].gate.event.set()
    assert len(done) == 20 and fakes["a"].log == ["open"]
    assert not fakes.keeper.entries["a"].leases


async def test_a_failed_loading_is_told_to_all_and_the_next_request_tries_again(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "RETRY_AFTER", 3600.0)  # no slow machine decides
    model = fakes["a"]
    model.gate.event.clear()
    model.failure = CheckpointError("no such file")
    errors: list[BaseException] = []

    async def ask() -> None:
        with pytest.raises(CheckpointError, match="no such file") as caught:
            await fakes.keeper.lease("a")
        errors.append(caught.value)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        model.gate.event.set()
    assert len({id(error) for error in errors}) == 5, "each has its own, with its own traceback"
    await ask()  # at once, and nothing is tried
    assert model.log == ["open"] and fakes.state("a") is ModelState.UNLOADED
    monkeypatch.setattr(fakes.keeper.entries["a"], "failed_until", 0.0)
    model.failure = None
    async with fakes.use("a"), anyio.create_task_group():
        pass
    # One that can't wake is closed, and opened at the next request.
    async with fakes.use("b"):
        pass
    model.failure = CheckpointError("it is gone")
    with pytest.raises(CheckpointError, match="it is gone"):
        await fakes.keeper.lease("a")
    assert model.log == ["open", "open", "sleep", "wake", "close"] and fakes.state("a") is ModelState.UNLOADED


async def test_the_error_of_a_loading_does_not_keep_what_was_read(fakes: Fakes) -> None:
    class Weights:
        pass

    kept: list[weakref.ref[Weights]] = []
    gone_at_close: list[bool] = []
    model = fakes["a"]
    close = model.close

    async def read() -> None:
        weights = Weights()
        kept.append(weakref.ref(weights))
        try:
            raise OSError("the disk is gone")
        except OSError as error:
            raise CheckpointError("it ends early") from error

    async def closing() -> None:
        gone_at_close.append(kept[0]() is None)
        await close()

    model.open, model.close = read, closing  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="it ends early"):
        await fakes.keeper.lease("a")
    assert fakes.keeper.entries["a"].failure is not None and gone_at_close == [True]


async def test_a_model_in_use_never_sleeps(fakes: Fakes) -> None:
    """By a lease, or by requests in its session, which end without a word."""
    async with fakes.use("a"):
        pass
    fakes["a"].live = 1
    order: list[str] = []

    async def ask(name: str) -> None:
        async with fakes.use(name):
            order.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "b")
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.15)  # several looks: nothing may happen
        assert not order and fakes["a"].log == ["open"]
        fakes["a"].live = 0
    assert order == ["b"] and fakes["a"].log == ["open", "sleep"]


async def test_a_session_that_has_ended_is_no_use_and_is_opened_again(fakes: Fakes) -> None:
    """Its user closed it, or its engine crashed: awake, asleep, and with requests that never end."""
    async with fakes.use("a"):
        fakes["a"].ended, fakes["a"].live = True, 1
        async with fakes.use("b"):
            assert fakes["a"].log == ["open", "close"]
    fakes["a"].live = 0
    async with fakes.use("a"):
        assert fakes.state("b") is ModelState.SLEEPING
    fakes["b"].ended = True
    async with fakes.use("b"):
        assert fakes["b"].log == ["open", "sleep", "close", "open"]


async def test_a_request_in_a_sleeping_session_wakes_it(fakes: Fakes) -> None:
    for name in "ab":
        async with fakes.use(name):
            pass
    on_request = fakes["a"].on_request
    assert on_request is not None
    await anyio.to_thread.run_sync(on_request)
    await anyio.to_thread.run_sync(eventually, lambda: fakes.state("a") is ModelState.LOADED)
    assert fakes["b"].log == ["open", "sleep"]


async def test_requests_in_a_sleeping_session_are_answered_before_it_is_unloaded(fakes: Fakes) -> None:
    async with fakes.use("a"):
        pass
    async with anyio.create_task_group() as group:
        async with fakes.use("b"):
            assert fakes["a"].on_request is not None
            fakes["a"].live = 1
            fakes["a"].on_request()
            group.start_soon(fakes.keeper.unload, "a")
            await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(eventually, lambda: fakes.keeper.entries["a"].row.busy)
        await anyio.to_thread.run_sync(eventually, lambda: fakes.state("a") is ModelState.LOADED)
        fakes["a"].live = 0
    assert fakes["a"].log == ["open", "sleep", "wake", "close"]


async def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    fakes = Fakes(limits=ShelfLimits(memory=25 << 20))
    fakes["a"].size, fakes["b"].size = 30 << 20, 20 << 20
    with pytest.raises(OutOfMemory, match=r"'a' takes 30 MiB .* may take 25"):
        await fakes.keeper.lease("a")
    async with fakes.use("b"):
        pass
    fakes.keeper.close()
    await fakes.keeper.ended.get()


async def test_a_task_does_not_wait_for_what_it_prevents_itself(fakes: Fakes) -> None:
    async with fakes.use("a"):
        with pytest.raises(InvalidRequest, match="no room for both"):
            await fakes.keeper.lease("b")
        async with fakes.use("a"):
            pass


async def test_nor_for_a_request_of_a_sleeping_session_that_it_keeps_asleep(fakes: Fakes) -> None:
    for name in "ab":
        async with fakes.use(name):
            pass
    async with fakes.use("b"):
        with pytest.raises(InvalidRequest, match="'b', and there is no room for both"):
            fakes["a"].on_wait()
        await anyio.to_thread.run_sync(fakes["a"].on_wait)  # another caller may wait for the end of this use
    fakes["a"].on_wait()


async def test_a_use_that_begins_before_the_sleep_keeps_a_model_awake(fakes: Fakes) -> None:
    async with fakes.use("a"):
        pass
    fakes["a"].begins = 3
    async with fakes.use("b"):
        assert fakes["a"].log == ["open", "sleep"] and fakes["a"].begins == 0


async def test_nor_for_one_whose_size_is_not_known_yet() -> None:
    fakes = Fakes(limits=ShelfLimits(memory=25))
    fakes["b"].size = 20
    async with fakes.use("a"):
        async with fakes.use("c"):
            pass
        with pytest.raises(InvalidRequest, match="no room for both"):
            await fakes.keeper.lease("b")
    async with fakes.use("b"):
        assert fakes.held == {"b": 20}
    fakes.keeper.close()
    await fakes.keeper.ended.get()


async def test_lines_are_bounded(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "MOST_WAITING", 2)
    fakes["a"].gate.event.clear()
    waiters = [fakes.keeper.wait("a") for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait"):
        fakes.keeper.wait("a")
    for waiter in waiters:
        waiter.cancel()
        with pytest.raises(RequestAborted):
            await waiter
    fakes["a"].gate.event.set()
    async with fakes.use("a"):
        pass


async def test_closing_while_one_is_loaded_gives_it_up(fakes: Fakes) -> None:
    fakes["a"].gate.event.clear()  # and it never opens
    waiter = fakes.keeper.wait("a")
    await anyio.to_thread.run_sync(eventually, lambda: fakes["a"].log == ["open"])
    fakes.keeper.close()
    with pytest.raises(SessionClosed, match="shelf was closed"):
        await waiter
    await fakes.keeper.ended.get()
    with pytest.raises(SessionClosed):
        await fakes.keeper.lease("b")


async def test_one_unloads_after_its_requests_and_the_next_loads_it_again(fakes: Fakes) -> None:
    async with anyio.create_task_group() as group, fakes.use("a"):
        group.start_soon(fakes.keeper.unload, "a")
        await anyio.wait_all_tasks_blocked()
        assert fakes["a"].log == ["open"]
    assert fakes["a"].log == ["open", "close"]
    async with fakes.use("a"):
        assert fakes["a"].log == ["open", "close", "open"]


async def test_an_unload_that_is_cancelled_leaves_the_model_open_for_all(fakes: Fakes) -> None:
    async with fakes.use("a"):
        async with anyio.create_task_group() as group:
            group.start_soon(fakes.keeper.unload, "a")
            await anyio.wait_all_tasks_blocked()
            waiter = fakes.keeper.wait("a")  # until it was unloaded
            group.cancel_scope.cancel()
        (await waiter).release()
        async with fakes.use("a"):
            pass
    assert fakes["a"].log == ["open"]


async def test_idle_ones_are_unloaded() -> None:
    fakes = Fakes(limits=ShelfLimits(idle_unload=0.02))
    async with fakes.use("a"):
        await anyio.sleep(0.1)
        assert fakes.state("a") is ModelState.LOADED, "it is in use"
    await anyio.to_thread.run_sync(eventually, lambda: fakes.state("a") is ModelState.UNLOADED)
    fakes.keeper.close()
    await fakes.keeper.ended.get()


async def test_a_crowd_of_two_hundred_at_random_leaks_nothing(fakes: Fakes) -> None:
    """Threads change places at every chance."""
    answered: list[str] = []

    async def ask(number: int) -> None:
        name = "abc"[number * 7919 % 3]
        with anyio.move_on_after(0.003 if number % 10 == 0 else None):
            async with fakes.use(name):
                assert set(fakes.held) == {name}
                await anyio.lowlevel.checkpoint()
                answered.append(name)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(ask, number)
    finally:
        sys.setswitchinterval(interval)
    assert len(answered) >= 180
    assert not any(entry.line or entry.leases for entry in fakes.keeper.entries.values())
