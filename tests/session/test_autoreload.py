"""A notebook under `%autoreload 2`: sessions, their handles and their errors outlive edits of the user's modules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.kernels_under_test import Kernel, kernel

# jupyter_client leaves event loops and their sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MINE = """
import rekindle
from rekindle.errors import InvalidRequest

class Asker(rekindle.Sampling):
    pass

VERSION = {version}

async def ask(session, text):
    done = await session.generate(text, rekindle.Sampling(max_tokens={version}))
    assert isinstance(done, rekindle.Completion)
    return len(done.token_ids)

async def refused(session):
    try:
        await session.generate("x", temprature=1)
    except InvalidRequest as error:
        return error.field
"""


def edit(file: Path, version: int) -> None:
    file.write_text(MINE.format(version=version))
    os.utime(file, (version * 100 + 1e9, version * 100 + 1e9))  # the same second would not count as an edit


def check(notebook: Kernel, version: int) -> None:
    assert notebook.ok("print(mine.VERSION, await mine.ask(session, 'hi'), await mine.refused(session))") == (
        f"{version} {version} temprature"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("loop", ["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def test_a_session_goes_on_under_autoreload(loop: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    edit(mine, 2)
    with kernel() as notebook:
        notebook.ok(f"%load_ext autoreload\n%autoreload 2\n%autoawait {loop}")
        notebook.ok(f"import sys; sys.path.append({str(tmp_path)!r})")
        notebook.ok("import mine, rekindle\nfrom helpers.sessions import fake_session, wait_until_idle")
        notebook.ok("session = fake_session(step_seconds=0.005)")
        check(notebook, 2)
        notebook.ok("handle = session.submit('runs on over an edit', max_tokens=200)")
        edit(mine, 3)
        check(notebook, 3)
        assert notebook.ok("print(isinstance(handle, rekindle.Handle), len((await handle).token_ids))") == "True 200"
        assert notebook.ok("async for delta in session.stream('x', max_tokens=4): print(delta.index, end='')") == "0000"
        edit(mine, 4)
        check(notebook, 4)
        notebook.ok(
            "async with session.paused():\n    h = session.submit('two', max_tokens=1)\n    r = await session.step()"
        )
        assert "prefill" in notebook.ok("print(r)")
        notebook.ok("wait_until_idle(session)\nawait session.aclose()")
        assert notebook.ok("print(session.closed)") == "True"
        notebook.ok("session = fake_session()")
        check(notebook, 4)
