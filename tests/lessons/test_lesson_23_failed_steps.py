"""A failing step fails the requests in it with its cause; the process and the session live on.

Upstream: https://github.com/sgl-project/sglang/issues/38022
One malformed request raised in the forward pass, and SIGQUIT ended the server.
"""

from __future__ import annotations

import anyio
import pytest

from helpers.sessions import expected, opened
from rekindle._src.core.records import StepPlan
from rekindle.errors import StepFailed


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["fail", "fail_fetch"])
async def test_lesson_23_every_request_ends_in_one_result_or_one_error(where: str) -> None:
    def fail(plan: StepPlan) -> Exception | None:
        return RuntimeError(f"step {plan.step} broke") if plan.step % 7 == 3 else None

    ends: list[str] = []
    with opened(step_seconds=0.001, **{where: fail}) as session:

        async def one(i: int) -> None:
            try:
                done = await session.generate(f"{i}", max_tokens=4)
                assert list(done.token_ids) == expected(f"{i}", max_tokens=4)
                ends.append("done")
            except StepFailed as error:
                ends.append(f"failed: {type(error.__cause__).__name__}")

        async with anyio.create_task_group() as group:
            for i in range(60):
                group.start_soon(one, i)
    assert len(ends) == 60 and set(ends) == {"done", "failed: RuntimeError"}


@pytest.mark.anyio
async def test_lesson_23_a_request_outside_of_the_failed_step_is_not_touched() -> None:
    broken: set[str] = set()

    def fail(plan: StepPlan) -> Exception | None:
        return RuntimeError("broke") if any(row.request.id in broken for row in plan.rows) else None

    with opened(fail=fail) as session:
        async with session.paused():
            victim = session.submit("victim", max_tokens=5)
            broken.add(victim.id)
            with pytest.raises(RuntimeError, match="broke"):
                await session.step()
            bystander = session.submit("bystander", max_tokens=5)
        with pytest.raises(StepFailed):
            await victim
        assert list((await bystander).token_ids) == expected("bystander", max_tokens=5)
