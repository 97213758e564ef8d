"""The option `mesh`: the devices over which one model is divided. It is read here without JAX.

"model"   devices that share every layer: heads, the rows of products, the vocabulary
"expert"  groups of such devices, each with its own experts; everything else is divided over all of them
"data"    shards of such devices, each with the whole model and its own pages and requests
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rekindle.errors import ConfigError

AXES = ("expert", "model")  # over which one model is divided; devices next to each other share a model axis
DATA = "data"
KNOWN = (DATA, *AXES)
MAX_DEVICES = 1 << 16  # a larger number is a slip
_NAMES = f"{', '.join(map(repr, AXES[::-1]))} and {DATA!r}"
_FIX = (
    'Pass the number of devices, {"model": 4, "expert": 2}, '
    '{"data": 2, "model": 4}, or a jax.sharding.Mesh with such axes'
)


class DeviceMesh(Protocol):
    """Devices with named axes, as `jax.sharding.Mesh` is: its axes are some of "model", "expert" and "data"."""

    @property
    def axis_names(self) -> tuple[Any, ...]: ...
    @property
    def devices(self) -> Any: ...


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


def checked_mesh(value: Any) -> MeshShape | DeviceMesh | None:
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
        mesh: DeviceMesh = value
        return mesh
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


def is_device_mesh(value: Any) -> bool:
    """True if `value` is a `jax.sharding.Mesh`. JAX is not imported for it."""
    kind = type(value)
    return kind.__name__ == "Mesh" and kind.__module__.split(".")[0] in ("jax", "jaxlib")


def _count(mesh: Any, value: Any) -> int:
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
