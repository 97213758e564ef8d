"""What a user sees of a cell that was interrupted: the own line and a sentence, not the frames of the library."""

from __future__ import annotations

import asyncio
import types

from rekindle.errors import RekindleError


def interrupted(error: BaseException, outcome: str) -> None:
    """Have a notebook show an interrupt in few lines, the last of which is the outcome. Errors stay as they are."""
    if isinstance(error, Exception):
        return
    error.__traceback__ = None  # the frames below the caller's
    # Those of anyio and trio bring words or types that they are known by.
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        error.__dict__["_render_traceback_"] = types.MethodType(RekindleError._render_traceback_, error)
        error.args = error.args or (outcome,)
