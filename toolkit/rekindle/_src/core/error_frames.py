"""Errors without their frames, to be kept."""

from __future__ import annotations


def forget_frames(error: BaseException) -> None:
    """Cut an error and its causes off the frames that they came through.

    These frames hold all that their functions were working with, and often the error itself: a cycle, which would stay
    until Python's collector finds it.
    """
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            errors += [other for other in (one.__cause__, one.__context__) if other is not None]
            errors += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
