"""This process's memory: how much it can still take, giving freed memory back, and pauses of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rekindle.errors import OutOfMemory
from rekindle_kernels import system

ROOT = Path("/")  # of /proc and /sys
# Of address space, for JAX's threads and the arenas of their memory. On two cores sessions opened with 1,054 MiB; with
# 854 C++ code, which ends the process where it gets none, ended some.
ADDRESSES = 1 << 30
SHARE = 0.75  # of available memory, for weights that need not be so large: pages, programs and others need some, too


class _Groups(NamedTuple):
    """The names of one version of Linux control groups."""

    sign: str  # in a line of /proc/self/cgroup
    mount: str
    limit: str
    use: str
    files: tuple[str, ...]  # counted as used, but freed when memory is needed


_VERSIONS = (
    _Groups("0::", "sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file")),
    _Groups(":memory:", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
            ("total_active_file", "total_inactive_file")),
)  # fmt: skip

FROZEN_AT_START = 1_000 if sys.version_info[:2] == (3, 12) else 0  # at most; 3.12 itself freezes some 400 objects
own_process = False  # True in the command line's process: no other code freezes objects, and imports stay to the end
_lock = threading.Lock()
_inside = 0  # threads
_was_on = _stays = False


total = system.total_memory


def available() -> int | None:
    """Return the bytes that neither other programs use nor a limit forbids, of the container or of this process; None
    if unknown."""
    reported = system.free_memory()
    if reported is not None:
        return reported
    try:
        lines = (ROOT / "proc/meminfo").read_text().splitlines()
        groups = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    free += [
        left for line in groups for version in _VERSIONS if version.sign in line for left in _within(version, line)
    ]
    addresses = address_space()
    return min([*free, *([] if addresses is None else [addresses])], default=None)


def device_available() -> int | None:
    """Return the bytes left on the fullest device that JAX computes with; None if unknown. CPUs have `available`."""
    import jax  # the rest of this module is for starts that may not need it

    if jax.default_backend() == "cpu":
        return available()
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    free = [int(own["bytes_limit"]) - int(own.get("bytes_in_use", 0)) for own in statistics if own.get("bytes_limit")]
    return min(free, default=None)


def address_space() -> int | None:
    """Return the bytes that this process may still map, under `ulimit -v`; None without such a limit."""
    limit = system.address_space_limit()
    if limit is None:
        return None
    try:
        pages = int((ROOT / "proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return max(0, limit - pages * mmap.PAGESIZE)


def check_address_space() -> None:
    """Raise OutOfMemory if a limit leaves no room for JAX: its threads would end the process."""
    left = address_space()
    if left is not None and left < ADDRESSES:
        raise OutOfMemory(
            f"JAX's threads take {ADDRESSES >> 20} MiB of address space, and the limit of this process leaves "
            f"{left >> 20}. Raise it: `ulimit -v`, or resource.setrlimit(resource.RLIMIT_AS, …)"
        )


def fits(size: int, *, beside: int = 0) -> bool:
    """True if `size` bytes fit into available memory in addition to `beside` other bytes.

    Also true if the system doesn't report free memory.
    """
    free = available()
    return free is None or size <= SHARE * (free - beside)


def _within(version: _Groups, line: str) -> Iterator[int]:
    """Yield the bytes left in a group and in each group around it. A container may see its own group as the mount."""
    mount, group = ROOT / version.mount, Path(line.rpartition(":")[2].lstrip("/"))
    for folder in {mount, mount / group, *(mount / part for part in group.parents)}:
        try:
            limit, in_use = (int((folder / name).read_text()) for name in (version.limit, version.use))
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no limit is the word "max"
            continue
        yield limit - in_use + sum(int(counts.get(name, 0)) for name in version.files)


def give_back() -> None:
    """Return whole pages of freed memory to the system where the C library can. Takes milliseconds; others may run.

    Reading a checkpoint in threads, and compiling, take memory in pieces of all sizes. glibc keeps the gaps between
    those still in use, for each of its arenas: 235 of 1,171 MiB that a session with a 4-bit model of 0.6B parameters
    had.
    """
    trim = libc_trim()
    if trim is not None:
        trim(0)


def given_back(context: Callable[[], AbstractContextManager[object]]) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of `context`'s contexts that also return freed memory to the system when they end."""

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        try:
            with context():
                yield
        finally:
            give_back()

    return inside


@cache
def libc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    import ctypes  # a few milliseconds of an import of rekindle

    with contextlib.suppress(OSError, AttributeError):  # musl has none
        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = [ctypes.c_size_t]
        function: Callable[[int], int] = trim
        return function
    return None


@contextmanager
def gc_paused(*, stays: bool = False) -> Iterator[None]:
    """Keep the collector off inside the block. Of several threads, the last one to leave turns it on if it was on.

    With `stays`, all objects count as old at the end, so that the next run doesn't scan the new ones: 70 ms after
    imports. Garbage among them is collected later.
    """
    global _inside, _was_on, _stays
    with _lock:
        if not _inside:
            _was_on, _stays = gc.isenabled(), False
            gc.disable()
        _inside += 1
        _stays |= stays
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_on:
                if _stays and own_process:
                    gc.freeze()
                elif _stays and gc.get_freeze_count() <= FROZEN_AT_START:  # objects that the user froze stay frozen
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()
