"""The display of a cell that was interrupted: the user's line and a sentence, not the frames of the library."""

from __future__ import annotations

import asyncio
import types

from rekindle.errors import RekindleError


def interrupted(error: BaseException, outcome: str) -> None:
    """Make a notebook show an interrupt in few lines, the last of which is the outcome. Errors stay as they are."""
    if isinstance(error, Exception):
        return
    error.__traceback__ = None  # the frames below the caller's
    # The exceptions of anyio and trio carry text or types by which those libraries recognise them.
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        error.__dict__["_render_traceback_"] = types.MethodType(RekindleError._render_traceback_, error)
        error.args = error.args or (outcome,)
