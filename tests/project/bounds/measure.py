"""Measures one row of the table of bounds in a process of its own: `python measure.py NUMBER` prints a line of JSON.

Linux only: the highest resident memory is that of /proc.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
SPEED = 4.0  # a slow or busy machine may take so many times as long
ROOM = 1.5  # and an allocator may keep so many times as much


class Cost(NamedTuple):
    """What all units of a bound would cost: those that were fed, multiplied."""

    seconds: float
    mib: float


def measured(number: int) -> Cost:
    """Return the cost of a row, by its number."""
    command = [sys.executable, "-P", str(Path(__file__)), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"row {number} could not be measured:\n{done.stderr[-4_000:]}")
    return Cost(*json.loads(done.stdout.splitlines()[-1]))


def _resident(name: str) -> int:
    """The bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _processor() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _measure(row: Any) -> Cost:
    held = [row.feed(row.count // 64)()]  # imports and caches
    work = row.feed(row.count)
    held.clear()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest resident memory is from here on
    before, began = _resident("VmRSS"), _processor()
    held.append(work())
    seconds, highest = _processor() - began, _resident("VmHWM")
    times = row.most / row.count
    return Cost(seconds * times, max(0, highest - before) / 2**20 * times)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT / name) for name in ("tests", "toolkit", "kernels")]
    from project.bounds.table import BOUNDS

    print(json.dumps(_measure(BOUNDS[int(sys.argv[1])])))
