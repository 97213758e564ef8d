"""News on their way to a fleet: tokens travel together, and only what can't wait wakes the one who asks for them."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from rekindle._src.core.records import FinishReason, TokenEvent
from rekindle._src.replicas import replica
from rekindle._src.replicas.replica import Box
from rekindle._src.replicas.wire import News

pytestmark = pytest.mark.anyio


def token(name: str, number: int, **more: Any) -> News:
    return News(TokenEvent(name, token_ids=(number,), **more))


async def test_tokens_that_come_meanwhile_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "TOGETHER", 200.0)
    woken: list[int] = []
    wake = replica.wake

    def counted(wakeups: Any) -> None:
        woken.append(len(wakeups))
        wake(wakeups)

    monkeypatch.setattr(replica, "wake", counted)
    box = Box()
    box.put(token("a", 0))
    assert [one.event.token_ids for one in await box.collect(5)] == [(0,)]
    woken.clear()

    def session() -> None:
        for number in range(50):
            box.put(token("a", number))
            box.put(token("b", number))
        box.put(token("c", 0)._replace(waited=0.1))

    thread = threading.Thread(target=session)
    thread.start()
    with anyio.fail_after(60):
        found = {one.event.request_id: one.event.token_ids for one in await box.collect(300)}
    thread.join()
    assert found == {"a": tuple(range(50)), "b": tuple(range(50)), "c": (0,)}
    assert len(woken) == 2, "by the first of them, and by a request's first token"


@pytest.mark.parametrize("urgent", [{"waited": 0.1}, {"finish_reason": FinishReason.STOP}], ids=str)
async def test_first_tokens_and_ends_do_not_wait_for_company(
    monkeypatch: pytest.MonkeyPatch, urgent: dict[str, Any]
) -> None:
    monkeypatch.setattr(replica, "TOGETHER", 200.0)
    box = Box()
    box.put(token("a", 0))
    await box.collect(5)

    async def session() -> None:
        await anyio.sleep(0.05)
        box.put(token("a", 1))
        await anyio.sleep(0.05)
        waited = urgent.get("waited")
        more = {name: value for name, value in urgent.items() if name != "waited"}
        box.put(token("b", 2, **more)._replace(waited=waited))

    async with anyio.create_task_group() as group:
        group.start_soon(session)
        with anyio.fail_after(60):
            found = await box.collect(300)
    assert [one.event.token_ids for one in found] == [(1,), (2,)]
