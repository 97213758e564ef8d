"""Sessions whose programs are whole from the beginning: those of a first text may be of parts, which run slower."""

from __future__ import annotations

from typing import Any

import anyio.to_thread

from rekindle._src.session.session import Session


async def whole_programs(session: Session) -> None:
    """From now on every step runs in a program that is compiled as a whole, as all do some seconds later."""
    runner: Any = session._engine.runner  # or one that records
    await anyio.to_thread.run_sync(runner.programs.end_parts)
