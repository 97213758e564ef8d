"""Thousands of requests, each cancelled at a random point in a random way; afterwards everything is back."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.fakes import FakeModel
from helpers.sessions import engine_of, expected, host_of, opened, threads, wait_until_idle
from helpers.thorough import trio_in_ci
from rekindle import EngineConfig, Session
from rekindle._src.dispatch.threads import Mailbox
from rekindle.errors import RequestAborted

CONFIG = EngineConfig(max_requests=6, max_tokens_per_step=32, max_model_len=128, page_size=8, max_queue=20, seed=1)
WAYS = ("await", "timeout", "break", "cancel", "drop", "thread", "task")


async def use(session: Session, way: str, prompt: str, dice: random.Random) -> None:
    """One request's life, ended in the given way after a random while."""
    tokens, patience = dice.randint(1, 12), dice.random() * 0.02
    call = session.generate(prompt, max_tokens=tokens)
    if way == "await":
        done = await call
        assert list(done.token_ids) == expected(prompt, FakeModel(), max_tokens=tokens)
    elif way == "timeout":
        with anyio.move_on_after(patience):
            await call
    elif way == "break":
        async for _ in session.stream(prompt, max_tokens=tokens):
            if dice.random() < 0.3:
                break
    elif way == "task":
        async with anyio.create_task_group() as group:
            group.start_soon(session.generate, prompt)
            await anyio.sleep(patience)
            group.cancel_scope.cancel()
    else:
        handle = await session.admit(prompt, max_tokens=tokens)
        await anyio.sleep(patience)
        if way == "drop":
            del handle
            return
        if way == "thread":
            thread = threading.Thread(target=handle.cancel)
            thread.start()
        else:
            handle.cancel()
        with contextlib.suppress(RequestAborted):
            await handle


@trio_in_ci
@pytest.mark.anyio
async def test_two_thousand_requests_cancelled_at_random_points() -> None:
    before = threads()
    mailboxes: weakref.WeakSet[Any] = weakref.WeakSet()
    make = Mailbox.__init__

    def counted(self: Mailbox, count: int) -> None:
        make(self, count)
        mailboxes.add(self)

    dice = random.Random(2)
    with opened(CONFIG, num_pages=60) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "__init__", counted)
        limiter = anyio.CapacityLimiter(40)

        async def one(i: int) -> None:
            async with limiter:
                shared = "a shared prefix of pages " * dice.randint(0, 2)
                await use(session, dice.choice(WAYS), f"{shared}{i}", dice)

        with anyio.fail_after(240):
            async with anyio.create_task_group() as group:
                for i in range(2000):
                    group.start_soon(one, i)
        wait_until_idle(session)
        dispatch = host_of(session)._dispatch
        assert dispatch is not None and not dispatch.outputs and not dispatch.mailboxes
        assert session.stats().running == session.stats().waiting == 0
        assert engine_of(session).scheduler.statistics().leaving == 0
        gc.collect()
        assert len(mailboxes) <= 2, "mailboxes outlive their requests"
    assert threads() <= before


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lives=st.lists(
        st.tuples(
            st.sampled_from(["keep", "cancel", "drop"]), st.integers(0, 8), st.integers(1, 6), st.integers(1, 40)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_aborts_at_every_step_of_every_interleaving(lives: list[tuple[str, int, int, int]]) -> None:
    """Single steps make the point of each abort exact: while queued, prefilling, in flight, finishing, finished."""
    with opened(CONFIG, num_pages=40) as session:
        with session.paused():
            handles: dict[int, Any] = {
                i: session.submit("x" * length, max_tokens=tokens) for i, (_, _, tokens, length) in enumerate(lives)
            }
            for step in range(9):
                for i, (end, at, _, _) in enumerate(lives):
                    if at == step and end != "keep" and i in handles:
                        handles[i].cancel() if end == "cancel" else handles.pop(i)
                session.step_sync()
        for i, handle in handles.items():
            end, _, tokens, length = lives[i]
            if end == "keep":
                assert list(handle.result_sync().token_ids) == expected("x" * length, max_tokens=tokens)
