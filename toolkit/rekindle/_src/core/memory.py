"""The memory that this process can still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")  # of /proc and /sys
SHARE = 0.75  # of what is available, for weights that need not be so large: pages, programs and others need some, too


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


def available() -> int | None:
    """Return the bytes that neither other programs use nor a container's limit forbids; None if unknown."""
    try:
        lines = (ROOT / "proc/meminfo").read_text().splitlines()
        groups = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    free += [
        left for line in groups for version in _VERSIONS if version.sign in line for left in _within(version, line)
    ]
    return min(free, default=None)


def fits(size: int, *, beside: int = 0) -> bool:
    """True if `size` bytes fit into available memory `beside` others, or if the system doesn't report what is free."""
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
