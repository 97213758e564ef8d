"""Changes inside a model in a file: safetensors with a vector for each site and layer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.taps import STEER_SITES, Steer
from rekindle.errors import ConfigError, InvalidRequest

TYPES: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
LONGEST = 1 << 20  # bytes of a header
NAMES = 'Name each vector by its site and layer, as in safetensors.numpy.save_file({"residual.8": vector}, path)'


def read_changes(path: str | Path) -> tuple[Steer, ...]:
    """Return the changes in a file, in the order of layers. Raise ConfigError if it has none, or can't be read.

    A tensor "residual.8" is the vector of that site and layer, in 16, 32 or 64 bits; the file's metadata may have a
    `mode` and a `scale` of all of them.
    """
    file = Path(path).expanduser()
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _wrong(file, f"can't be read: {error.strerror or error}", "Check the path") from None
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > LONGEST:
            raise ValueError
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        vectors = {name: _vector(data[8 + length :], entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        fix = f"Write vectors in 16, 32 or 64 bits, without bfloat16. {NAMES}"
        raise _wrong(file, "is no safetensors file of float vectors", fix) from None
    mode, scale = metadata.get("mode", "add"), metadata.get("scale", "1")
    try:
        factor = float(scale)
    except ValueError:
        raise _wrong(file, f"has a scale {scale!r}", "Write a number") from None
    changes = []
    for name, vector in vectors.items():
        site, _, layer = name.partition(".")
        if site not in STEER_SITES or not layer.isdecimal() or vector.ndim != 1:
            raise _wrong(file, f"has a tensor {name!r} of shape {vector.shape}", NAMES)
        try:
            changes.append(Steer(int(layer), vector, factor, mode=mode, site=site))
        except InvalidRequest as error:
            raise _wrong(file, f"has a change that can't be: {error}", "Correct it") from None
    if not changes:
        raise _wrong(file, "has no vectors", NAMES)
    return tuple(sorted(changes, key=lambda change: change.layer))


def _vector(data: bytes, entry: Any) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    numbers: NDArray[Any] = np.frombuffer(data[begin:end], TYPES[entry["dtype"]])
    return numbers.reshape(entry["shape"])


def _wrong(file: Path, problem: str, fix: str) -> ConfigError:
    return ConfigError("steering", str(file), problem, fix)
