"""`session.embed` as a call: lists of thousands, cancelling, errors, progress, wrong arguments; over fakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import anyio
import numpy as np
import pytest

from helpers.fakes import FakeModel
from helpers.scheduling import NoReserve
from helpers.sessions import CONFIG, engine_of, opened, wait_until_idle
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.calls.embedding import EmbeddingProgress
from rekindle._src.dispatch.threads import Mailbox
from rekindle.errors import InvalidRequest, RequestAborted, StepFailed


def plain(text: str, pooling: str = "mean") -> np.ndarray:
    values = FakeModel().extend(np.zeros(0, np.uint64), text.encode())
    parts = np.stack([values >> np.uint64(40), values & np.uint64(0xFF)], axis=1).astype(np.float64)
    return parts.mean(axis=0) if pooling == "mean" else parts[-1 if pooling == "last" else 0]


@pytest.mark.anyio
@pytest.mark.parametrize("pooling", by_default(["mean", "last", "cls"]))
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_thousands_wait_for_places(session: Session, pooling: Any) -> None:
    """More texts than the session has places, along with a generation, which keeps its tokens."""
    places = session.stats().places
    texts = [f"text {number} " * (1 + number % 9) for number in range(5 * places)]
    alone = (await session.generate("hello", max_tokens=60)).token_ids
    handle = session.submit("hello", max_tokens=60)
    vectors = await session.embed(texts, pooling=pooling, normalize=False)
    assert (await handle).token_ids == alone
    np.testing.assert_allclose(vectors, np.stack([plain(text, pooling) for text in texts]), rtol=1e-6)
    assert session.stats().scheduler.cached_tokens == 0  # texts that begin alike are computed all the same


@pytest.mark.anyio
async def test_preemption_starts_a_sum_again() -> None:
    config = dataclasses.replace(CONFIG, max_tokens_per_step=16)
    texts = ["a text of more than one step, " * 6 + str(number) for number in range(8)]
    with opened(config, num_pages=60) as session:
        engine_of(session).scheduler._admission.reserve = NoReserve()
        handles = [session.submit(f"{number} is a number", max_tokens=200) for number in range(6)]
        vectors = await session.embed(texts, normalize=False)
        for handle in handles:
            await handle
        assert session.stats().scheduler.preemptions
    np.testing.assert_allclose(vectors, np.stack([plain(text) for text in texts]), rtol=1e-6)


@pytest.mark.anyio
async def test_a_cancelled_list_leaves_nothing(slow: Session) -> None:
    with anyio.move_on_after(0.05) as scope:
        await slow.embed(["a long text " * 30] * 200)
    assert scope.cancelled_caught
    call = slow.embed(["a long text " * 30] * 200)
    async with anyio.create_task_group() as group:

        async def cancelled() -> None:
            with pytest.raises(RequestAborted):
                await call

        group.start_soon(cancelled)
        await anyio.sleep(0.03)
        call.cancel()
    wait_until_idle(slow)


@pytest.mark.anyio
async def test_a_failed_step_fails_its_texts_and_the_rest_goes_on() -> None:
    failing = [ValueError("no")]
    with opened(fail=lambda plan: failing.pop() if failing else None) as session:
        found = await session.embed([f"{number} text " * 5 for number in range(20)], errors="return")
        assert {type(one) for one in found} == {StepFailed, np.ndarray}
        with pytest.raises(InvalidRequest, match=r"prompt\[1\]=''.*has no tokens"):
            await session.embed(["x", ""])
        two = await session.embed(["x", 3, "y"], errors="return")  # type: ignore[list-item]
        assert isinstance(two[1], InvalidRequest) and two[1].index == 1 and isinstance(two[2], np.ndarray)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pooling": "max"}, "pooling='max': is not known. Use 'mean' or 'last' or 'cls'"),
        ({"prompt_name": ["query"]}, "prompt_name=['query']: is not a prompt of this model"),
        ({"prompt_name": "query"}, "prompt_name='query': is not a prompt of this model. Leave it out, or use"),
        ({"normalize": 1}, "normalize=1: is neither True nor False"),
        ({"dimensions": 0}, "dimensions=0: is not a whole number from 1"),
        ({"errors": "ignore"}, "errors='ignore': is not known"),
        ({"errors": "return"}, "errors='return': is for a list of texts"),
        ({"priority": 3}, "priority=3: means nothing under policy='fcfs'"),
    ],
)
def test_wrong_arguments_are_named(session: Session, options: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        session.embed_sync("text", **options)
    assert said in str(raised.value)


@pytest.mark.anyio
async def test_one_step_at_a_time_runs_the_chunks_of_a_text(session: Session) -> None:
    async with session.paused(), anyio.create_task_group() as group:
        found: list[Any] = []

        async def embed() -> None:
            found.append(await session.embed("x" * 100, normalize=False))

        group.start_soon(embed)
        chunks = []
        while sum(chunks) < 100:
            report = await session.step()
            if report is not None:
                chunks += [row.stop - row.start for row in report.rows]
            await anyio.sleep(0.001)
    assert chunks == [64, 36]
    np.testing.assert_allclose(found[0], plain("x" * 100), rtol=1e-6)


def test_the_progress_of_a_list() -> None:
    mailboxes = [Mailbox(1) for _ in range(4)]
    progress = EmbeddingProgress(mailboxes)
    assert progress.look() == ("0 of 4 texts", 0.0)
    for mailbox in mailboxes[:3]:
        mailbox.prompt_ids = np.arange(50, dtype=np.int32)
        mailbox.complete(0, ValueError())
    line, fraction = progress.look()
    assert fraction == 0.75 and "3 of 4 texts, " in line and "tokens/s, 0 s left" in line
