"""How the replicas of one machine divide its cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence


def pin(cores: Sequence[int]) -> None:
    """Keep all threads of this process, and those that they start, on these cores; so replicas divide a machine."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["0"]:
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def cores_of(index: int, replicas: int) -> tuple[int, ...]:
    """The share of this machine's cores that one of several replicas gets; none where it is not known."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0))
    if replicas >= len(cores):
        return (cores[index % len(cores)],)
    return tuple(cores[index * len(cores) // replicas : (index + 1) * len(cores) // replicas])


def shares(index: int, replicas: int, processes: int) -> tuple[tuple[int, ...], ...]:
    """The cores of each process of one of several replicas: equally many, since they have to compute alike."""
    total = replicas * processes
    parts = [cores_of(index * processes + process, total) for process in range(processes)]
    least = min(len(part) for part in parts)
    return tuple(part[:least] for part in parts)
