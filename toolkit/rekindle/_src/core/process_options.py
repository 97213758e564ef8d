"""The options `processes` and `coordinator`: the number of processes that share a model, and their meeting point."""

from __future__ import annotations

from typing import Any

from rekindle._src.core.mesh_shape import DATA, MeshShape
from rekindle.errors import ConfigError

MAX_PROCESSES = 1 << 12  # a larger number is a slip
_FIX = 'Pass "host:port": an address of the leader that followers reach'


def check_processes(processes: int, coordinator: Any, mesh: Any) -> None:
    """Raise ConfigError for a mesh that the processes can't share, or if they have no address to meet at."""
    if not (coordinator is None or isinstance(coordinator, str)):
        raise ConfigError("coordinator", coordinator, "is not text", _FIX)
    if processes == 1:
        if coordinator is not None:
            raise ConfigError("coordinator", coordinator, "is for several processes", "Pass processes, too")
        return
    if processes > MAX_PROCESSES:
        raise ConfigError("processes", processes, "are more than there can be", f"Use at most {MAX_PROCESSES:,}")
    if coordinator is None:
        raise ConfigError("coordinator", None, f"is missing: {processes} processes need a place to meet", _FIX)
    address(coordinator)
    if not isinstance(mesh, MeshShape):
        raise ConfigError(
            "mesh",
            mesh,
            "has to say how many devices the processes share",
            'Pass a number, or {"model": 8, "expert": 2}',
        )
    if mesh.get(DATA, 1) > 1:
        raise ConfigError(
            "mesh",
            mesh,
            f"has data shards, which {processes} processes can't have together yet",
            f"Leave {DATA!r} out, or open a session in each process",
        )
    if mesh.size % processes:
        raise ConfigError(
            "mesh", mesh, f"has {mesh.size} devices, which {processes} processes can't share evenly",
            f"Use a multiple of {processes}",
        )  # fmt: skip


def address(text: str, field: str = "coordinator", fix: str = _FIX) -> tuple[str, int]:
    """Return host and port. Raises ConfigError for text that is no address."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(field, text, "is no address", fix)
    return host, int(port)
