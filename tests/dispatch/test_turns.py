"""Turns by themselves: bounded, fair between callers, and left without a trace."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from rekindle._src.dispatch.intake import Turns

pytestmark = pytest.mark.anyio


async def test_callers_take_turns_and_each_is_served_in_order() -> None:
    turns, begun, inside = Turns(1), list[str](), 0

    async def work(caller: str, number: int) -> None:
        nonlocal inside
        async with turns.turn(caller):
            inside += 1
            assert inside == 1
            begun.append(f"{caller}{number}")
            await anyio.lowlevel.checkpoint()
            inside -= 1

    async with anyio.create_task_group() as group, turns.turn("x"):
        for caller, number in [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("b", 1)]:
            group.start_soon(work, caller, number)
            await anyio.wait_all_tasks_blocked()
        assert not begun
    assert begun == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert not turns.waiting and turns.free == 1


async def test_tasks_that_leave_the_line_cost_no_place() -> None:
    turns, begun, go = Turns(2), list[int](), anyio.Event()

    async def work(number: int, scope: anyio.CancelScope) -> None:
        with scope:
            async with turns.turn("a"):
                begun.append(number)
                await go.wait()

    scopes = [anyio.CancelScope() for _ in range(9)]
    async with anyio.create_task_group() as group:
        for number, scope in enumerate(scopes):
            group.start_soon(work, number, scope)
            await anyio.wait_all_tasks_blocked()
        for scope in scopes[2:8]:
            scope.cancel()
        scopes[0].cancel()
        go.set()
    assert sorted(begun) == [0, 1, 8]
    assert not turns.waiting and turns.free == 2


async def test_a_turn_that_comes_as_its_task_is_cancelled_goes_to_the_next() -> None:
    turns, begun = Turns(1), list[str]()

    async def work(name: str, scope: anyio.CancelScope) -> None:
        with scope:
            async with turns.turn(name):
                begun.append(name)

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as group:
        async with turns.turn():
            group.start_soon(work, "first", first)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(work, "second", second)
            await anyio.wait_all_tasks_blocked()
        first.cancel()  # its turn has come, and it has not run since
    assert begun[-1] == "second" and turns.free == 1
