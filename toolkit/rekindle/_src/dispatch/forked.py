"""Sessions and `os.fork()`: a child has the memory of its parent but none of its threads, JAX's included.

A session that was opened in such a child would wait for those threads for ever, so it is refused at once.
"""

from __future__ import annotations

import os

from rekindle.errors import SessionForked

_FIX = "Open one in a process that is started anew, such as by multiprocessing.get_context('spawn')"
_started_in: list[int] = []  # the process that started the first session of this memory


def opening() -> None:
    """Note that a session is about to be opened. Raises SessionForked if the parent of this process had opened one."""
    if not _started_in:
        _started_in.append(os.getpid())
    elif _started_in[0] != os.getpid():
        raise SessionForked(
            f"a session was open in process {_started_in[0]} before this process {os.getpid()} was forked from it, and "
            f"JAX's threads are missing here. {_FIX}"
        )


def refusal(pid: int) -> SessionForked:
    """Return the error for a session of process `pid` that is used in its child."""
    return SessionForked(f"the session belongs to process {pid}, this is its forked child {os.getpid()}. {_FIX}")
