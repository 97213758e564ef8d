"""The boundary around code that handles one request: an exception of any kind ends that request and no other.

Every place of the host side that works for a single request (taking it in, routing it, sending and reading it,
queueing it, making its text) catches `BaseException` and ends the request with `own_failure`. Where a user interrupts a
cell, `interrupted` keeps its display short.

The end of a request is the one place where nothing is left to fail: its outcome is in the mailbox before its resources
are closed, and `close_each` closes them.
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Callable

from rekindle.errors import RekindleError, RequestFailed

log = logging.getLogger("rekindle.session")


def own_failure(error: BaseException, what: str) -> RekindleError:
    """Return the error for the request with the code that raised `error`; `what` names the failed work.

    A typed error is returned unchanged. Raises `error` again if it is no failure of the request: a cancellation, an
    interrupt or an exit.
    """
    if isinstance(error, RekindleError):
        return error
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
    failure = RequestFailed(f"{what}: {one_line(error)}")
    failure.__cause__ = error
    return failure


def close_each(what: str, *closings: Callable[[], object]) -> None:
    """Call each of `closings`, which give up what `what` had. What one of them raises is logged and goes no further."""
    for close in closings:
        try:
            close()
        except BaseException as error:
            log.warning("%s has ended, but not all of it could be closed: %s", what, one_line(error))


def is_panic(error: BaseException) -> bool:
    """True if an exception is a Rust panic, which derives from `BaseException`.

    pyo3's class can't be imported, so its name is compared.
    """
    return any(kind.__name__ == "PanicException" for kind in type(error).__mro__)


def one_line(error: BaseException) -> str:
    """Return an exception in one line of at most 500 characters, even if its repr raises."""
    try:
        text = repr(error)
    except Exception:
        text = f"<{type(error).__name__}>"
    return text if len(text) <= 500 else text[:497] + "..."


def root_cause(error: BaseException) -> BaseException:
    """Return the exception that ended the first task of a group; the other tasks were cancelled because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def interrupted(error: BaseException, outcome: str) -> None:
    """Make a notebook show an interrupt in a few lines that end with the outcome. Errors stay as they are."""
    if isinstance(error, Exception):
        return
    error.__traceback__ = None  # the frames below the caller's
    # The exceptions of anyio and trio carry text or types that let those libraries recognise them.
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        error.__dict__["_render_traceback_"] = types.MethodType(RekindleError._render_traceback_, error)
        error.args = error.args or (outcome,)
