"""A flood of long prompts does not stall requests that generate: every step carries all of them, prefill gets the rest.

Upstream: https://github.com/ggml-org/llama.cpp/issues/29175
A long prompt's prefill blocked all other sequences for tens of seconds.
"""

from __future__ import annotations

import pytest

from helpers.fakes import FakeRunner
from helpers.sessions import CONFIG, engine_of, expected, opened
from helpers.small import CONTEXT, OPTIONS, opening, plain, prompt
from rekindle._src.session.stats import StepReport

pytestmark = pytest.mark.usefixtures("large_steps")
NEW = 40


@pytest.mark.anyio
async def test_lesson_28_every_step_of_a_flood_carries_every_row_that_decodes() -> None:
    talking = [prompt(seed, 4) for seed in range(2)]
    flood = [prompt(100 + seed, CONTEXT - 2) for seed in range(20)]
    reports: list[StepReport] = []
    async with opening() as session:
        async with session.paused():
            first = [session.submit(ids, max_tokens=NEW, ignore_eos=True) for ids in talking]
            while not all(handle.token_ids for handle in first):
                await session.step()
            late = [session.submit(ids, max_tokens=2, ignore_eos=True) for ids in flood]
            while not all(handle.done for handle in first):
                reports.append(await session.step())
            left = [handle for handle in late if not handle.done]
        most = engine_of(session).scheduler.limits.max_beside_decode
        for ids, handle in zip(talking + flood, first + late, strict=True):
            done = await handle
            assert done.token_ids == plain(ids, len(done.token_ids))
    assert left, "the flood was over too early to show anything"
    budget = OPTIONS["max_tokens_per_step"]
    for report in reports:
        decoding = {row.request_id for row in report.rows if row.kind == "decode"}
        assert decoding >= {handle.id for handle in first}, f"somebody who generates was left out of {report}"
        assert report.tokens <= budget
    assert len(reports) == NEW - 1, "a token for everybody in every step"
    decoded = [sum(row.kind == "decode" for row in report.rows) for report in reports]
    full = [report for report, rows in zip(reports, decoded, strict=True) if report.tokens == min(budget, rows + most)]
    assert len(full) > len(reports) / 2, "prefill does not use what decoding leaves of the budget"


@pytest.mark.anyio
async def test_lesson_28_nobody_misses_a_step_while_the_loop_runs_freely() -> None:
    with opened(step_seconds=0.001) as session:
        talker = session.submit("a short one", max_tokens=100)
        async for _ in talker:
            break
        flood = [session.submit(f"{i} " + "long " * 90, max_tokens=1) for i in range(60)]
        assert list((await talker).token_ids) == expected("a short one", max_tokens=100)
        for handle in flood:
            await handle
        runner = engine_of(session).runner
        assert isinstance(runner, FakeRunner)
        rows = [{row.request.id for row in plan.decode} for plan in runner.plans]
    mine = [at for at, ids in enumerate(rows) if talker.id in ids]
    assert mine == list(range(mine[0], mine[0] + 99)), "a step left out a request that was generating"
    beside = [runner.plans[at] for at in mine if runner.plans[at].prefill]
    assert len(beside) > 30, "no flood came"
    assert max(plan.tokens for plan in beside) == CONFIG.max_tokens_per_step
