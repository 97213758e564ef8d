"""The cause of a task group's end."""

from __future__ import annotations


def root_cause(error: BaseException) -> BaseException:
    """Return the exception that ended the first task of a group; the other tasks were cancelled because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
