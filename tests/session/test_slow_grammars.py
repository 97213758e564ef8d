"""Grammars that take long to follow: other requests keep their speed; too slow a one fails with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.sessions import engine_of, opened
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.capabilities.guides import step as guides
from rekindle._src.core.records import GuideReport
from rekindle._src.structured import endings
from rekindle._src.structured.grammar import Guide
from rekindle.errors import NoTokenLeft

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
pytestmark = pytest.mark.anyio


@pytest.fixture
def session() -> Iterator[Session]:
    with opened(step_seconds=0.005) as made:
        yield made


class Clock:
    """The time of a guide, as `guides` reads it."""

    now = 0.0

    def thread_time(self) -> float:
        return self.now

    perf_counter = thread_time


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a grammar takes twenty milliseconds of a processor."""
    consume, clock = Guide.consume, Clock()

    def slow(self: Guide, token: int) -> GuideReport:
        clock.now += 0.02
        return consume(self, token)

    monkeypatch.setattr(Guide, "consume", slow)
    monkeypatch.setattr(guides, "time", clock)


async def test_rows_of_slow_grammars_wait_outside_the_batch(session: Session, slowly: None) -> None:
    slow = [session.submit("x", regex="[0-9]{200}", max_tokens=150) for _ in range(3)]
    async for _ in slow[0]:
        break
    other = session.submit("hello", max_tokens=60, ignore_eos=True)
    assert len((await other).token_ids) == 60
    steps = [{row.request.id for row in plan.rows} for plan in engine_of(session).runner.plans]
    its_own = [number for number, rows in enumerate(steps) if other.id in rows]
    made = sum(len(rows - {other.id}) for rows in steps[its_own[0] : its_own[-1]])
    assert made <= 60, f"{made} slow tokens next to 60 others: each row of each step would make 180"
    for one in slow[1:]:
        one.cancel()
    assert len((await slow[0]).token_ids) == 150, "it goes on, and faster where nothing else runs"


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_looking_for_the_ends_of_texts_waits_for_its_turn(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six objects whose tokens run out together: a neighbour waits for one search at a time."""
    clock, shortest = Clock(), endings.Ending.shortest
    looks: set[tuple[int, int]] = set()  # at which of the neighbour's tokens an end was looked for, and in which text

    def slow(self: Any, matcher: Any, left: int) -> tuple[int, ...] | None:
        clock.now += 0.004
        looks.add((len(neighbour.token_ids), id(self)))
        return shortest(self, matcher, left)

    monkeypatch.setattr(endings.Ending, "shortest", slow)
    monkeypatch.setattr(endings, "time", clock)
    monkeypatch.setattr(guides, "time", clock)
    neighbour = session.submit("hello", max_tokens=900, ignore_eos=True)
    done = await session.generate("x", schema={"type": "object"}, n=6, max_tokens=160)
    neighbour.cancel()
    assert all(one.parsed is not None for one in done)
    last = len(neighbour.token_ids)  # after its end the objects run alone
    assert len({text for at, text in looks if at < last}) == 6
    counts = Counter(at for at, _ in looks if at < last)
    # Six at a time without taking turns. What is seen here may lag behind the steps, so single counts may be higher.
    assert counts.total() <= 2 * len(counts), f"searches between two of the neighbour's tokens: {counts}"


async def test_a_grammar_that_takes_too_long_for_a_token_fails_with_the_reason(
    session: Session, slowly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guides, "SLOWEST_TOKEN", 0.01)
    free = session.submit("hello", max_tokens=20, ignore_eos=True)
    with pytest.raises(NoTokenLeft, match=r"following one token took 0.02 s, and 0.01 s are possible.*ambiguous"):
        await session.generate("x", regex="[0-9]{200}", max_tokens=100)
    assert len((await free).token_ids) == 20
