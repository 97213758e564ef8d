"""The division of a machine's cores among its replicas."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence


def pin(cores: Sequence[int]) -> None:
    """Keep all threads of this process, and those that they start, on these cores."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["0"]:
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def cores_of(index: int, replicas: int) -> tuple[int, ...]:
    """Return a replica's share of this machine's cores, or none if the system does not report them."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0))
    if replicas >= len(cores):
        return (cores[index % len(cores)],)
    return tuple(cores[index * len(cores) // replicas : (index + 1) * len(cores) // replicas])


def shares(index: int, replicas: int, processes: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each process of a replica: the same number, since the processes run in step."""
    total = replicas * processes
    parts = [cores_of(index * processes + process, total) for process in range(processes)]
    size = min(len(part) for part in parts)
    return tuple(part[:size] for part in parts)
