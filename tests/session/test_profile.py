"""Profiles of a session: the programs of its steps are in the trace, and there is one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import small
from rekindle.errors import InvalidRequest, SessionClosed
from workshop.breakdown import executions

pytestmark = pytest.mark.usefixtures("large_steps")


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_a_profile_has_the_steps_of_the_block(tmp_path: Path) -> None:
    async with small.opening() as session:
        with session.profile(tmp_path / "traces") as folder:
            done = await session.generate(small.prompt(1, 9), max_tokens=5, ignore_eos=True)
        assert done.token_ids == small.plain(small.prompt(1, 9), 5)
        assert folder == tmp_path / "traces"
        assert len(executions(folder)) >= 5, "a program run for each token"


@pytest.mark.slow
@pytest.mark.anyio
async def test_one_profile_is_recorded_at_a_time(tmp_path: Path) -> None:
    async with small.opening() as session:
        with (
            session.profile(tmp_path),
            pytest.raises(InvalidRequest, match=r"folder=.*end that one first"),
            session.profile(tmp_path / "b"),
        ):
            pass
        with session.profile(tmp_path / "c"):
            pass
    with pytest.raises(SessionClosed), session.profile(tmp_path):
        pass
