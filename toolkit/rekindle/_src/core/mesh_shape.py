"""The options `mesh`, `processes` and `coordinator`: the devices over which one model is divided, read without JAX.

"model"   devices that share every layer: heads, the rows of products, the vocabulary
"expert"  groups of such devices, each with its own experts; everything else is divided over all of them
"data"    shards of such devices, each with the whole model and its own pages and requests

`MeshReport` is a session's report about them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from rekindle._src.core import words
from rekindle._src.core.drawable import Record
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

AXES = ("expert", "model")  # over which one model is divided; devices next to each other share a model axis
DATA = "data"
KNOWN = (DATA, *AXES)
MAX_DEVICES = 1 << 16  # a larger number is a slip
_NAMES = f"{', '.join(map(repr, AXES[::-1]))} and {DATA!r}"
_FIX = (
    'Pass the number of devices, {"model": 4, "expert": 2}, '
    '{"data": 2, "model": 4}, or a jax.sharding.Mesh with such axes'
)
MAX_PROCESSES = 1 << 12  # a larger number is a slip
_ADDRESS_FIX = 'Pass "host:port": an address of the leader that followers reach'


class DeviceMesh(Protocol):
    """Devices with named axes, as `jax.sharding.Mesh` is: its axes are some of "model", "expert" and "data"."""

    @property
    def axis_names(self) -> tuple[object, ...]: ...
    @property
    def devices(self) -> NDArray[Any]: ...


Mesh = int | Mapping[str, int] | DeviceMesh


class MeshShape(Mapping[str, int]):
    """The number of devices of each axis; hashable, and equal to a dict of the same numbers."""

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = {name: sizes[name] for name in KNOWN[::-1] if name in sizes}

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return hash(frozenset(self._sizes.items()))

    def __repr__(self) -> str:
        return repr(self._sizes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self._sizes.values())


def checked_mesh(value: object) -> MeshShape | DeviceMesh | None:
    """Return the option `mesh` in the form that a config keeps. Raises ConfigError for any other value."""
    if value is None or isinstance(value, MeshShape):
        return value
    if isinstance(value, Mapping):
        try:
            names = list(value)
            unknown = [name for name in names if not isinstance(name, str) or name not in KNOWN]
        except Exception:
            raise ConfigError("mesh", value, "can't be read as a dict", _FIX) from None
        if unknown or not names:
            problem = f"has the axis {unknown[0]!r}" if unknown else "has no axes"
            raise ConfigError("mesh", value, f"{problem}; known are {_NAMES}", _FIX)
        return MeshShape({name: _count(value, value[name]) for name in names})
    if is_device_mesh(value):
        axes = tuple(value.axis_names)
        unknown = [name for name in axes if name not in KNOWN]
        if unknown or not axes:
            problem = f"has the axis {unknown[0]!r}" if unknown else "has no axes"
            raise ConfigError("mesh", value, f"{problem}; known are {_NAMES}", _FIX)
        return value
    return MeshShape({"model": _count(value, value)})


def parsed_mesh(text: str) -> MeshShape:
    """Return a mesh from the command line: `4`, or `model=4,expert=2`. Raises ConfigError for anything else."""
    fix = "Use --mesh 4, --mesh model=4,expert=2, or --mesh data=2,model=4"
    try:
        if "=" not in text:
            return MeshShape({"model": _count(text, int(text))})
        pairs = [part.split("=") for part in text.split(",")]
        sizes = {name.strip(): int(count) for name, count in pairs}
        if len(sizes) != len(pairs):
            raise ValueError
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("--mesh", text, "is no mesh", fix) from None
    shape = checked_mesh(sizes)
    assert isinstance(shape, MeshShape), "a dict"
    return shape


def is_device_mesh(value: object) -> TypeGuard[DeviceMesh]:
    """True if `value` is a `jax.sharding.Mesh`. JAX is not imported for it."""
    kind = type(value)
    return kind.__name__ == "Mesh" and kind.__module__.split(".")[0] in ("jax", "jaxlib")


def _count(mesh: object, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        count = int(value.__index__())
    except Exception:
        raise ConfigError("mesh", mesh, "is no number of devices", _FIX) from None
    if not 1 <= count <= MAX_DEVICES:
        amount = f"{count:,}" if abs(count) < 1 << 64 else "absurdly many"  # Python prints no number of 5,000 digits
        raise ConfigError("mesh", mesh, f"asks for {amount} devices on an axis; one is the least", _FIX)
    return count


def check_processes(processes: int, coordinator: Any, mesh: Any) -> None:
    """Raise ConfigError for a mesh that the processes can't share, or if they have no address to meet at."""
    if not (coordinator is None or isinstance(coordinator, str)):
        raise ConfigError("coordinator", coordinator, "is not text", _ADDRESS_FIX)
    if processes == 1:
        if coordinator is not None:
            raise ConfigError("coordinator", coordinator, "is for several processes", "Pass processes, too")
        return
    if processes > MAX_PROCESSES:
        raise ConfigError("processes", processes, "are more than there can be", f"Use at most {MAX_PROCESSES:,}")
    if coordinator is None:
        raise ConfigError("coordinator", None, f"is missing: {processes} processes need a place to meet", _ADDRESS_FIX)
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


def address(text: str, field: str = "coordinator", fix: str = _ADDRESS_FIX) -> tuple[str, int]:
    """Return host and port. Raises ConfigError for any other text."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(field, text, "is no address", fix)
    return host, int(port)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class MeshReport(Record):
    """The devices of a session with `mesh` and the share of each; `session.stats().mesh`."""

    axes: Mapping[str, int]  # devices by axis
    devices: tuple[str, ...]
    heads: int  # attention heads of each device
    kv_heads: int  # KV heads of each device
    kv_copies: int  # devices that have the same KV heads
    weight_bytes: int  # on each device
    page_bytes: int  # of a KV page, on each device
    sums: int  # in a step, over the devices of one model; its logits are gathered once more
    bytes_per_token: int  # added by every device to those sums for each token of a step
    processes: int = 1  # that own these devices in equal numbers

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def named(self) -> str:
        """The devices in a few words."""
        axes = " × ".join(f"{name} {count}" for name, count in self.axes.items())
        among = f" of {self.processes} processes" if self.processes > 1 else ""
        return f"{words.count(self.size, 'device')}{among} ({axes})"

    def __str__(self) -> str:
        shared = f", {self.kv_copies} with the same ones" if self.kv_copies > 1 else ""
        return (
            f"{self.named}: each has {words.count(self.heads, 'head')}, "
            f"{words.count(self.kv_heads, 'kv head')}{shared}, {self.weight_bytes / 2**20:,.1f} MiB of weights"
        )


def describe_share(figures: Mapping[str, object]) -> str:
    """Return the collectives' share of a session's steps in words; empty if unknown."""
    share = figures.get("collective_share")
    return "" if share is None else f"{share:.0%} of the steps' time in collectives"
