"""Switches a session to whole programs from the beginning: its first programs may be of parts, which run slower."""

from __future__ import annotations

from typing import Any

import anyio.to_thread

from rekindle._src.session.session import Session


async def whole_programs(session: Session) -> None:
    """Run every further step in a program compiled as a whole, as all steps do some seconds later anyway."""
    runner: Any = session._engine.runner  # or a RecordingRunner
    await anyio.to_thread.run_sync(runner.programs.end_parts)
