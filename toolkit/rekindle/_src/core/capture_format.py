"""The format of captures in files: a folder of safetensors for each request, a file for each site and layer."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import InvalidRequest

HEADER = 504  # bytes of a header, padded with spaces; the array begins behind it and its length, at byte 512
SUFFIX = ".safetensors"
TYPES = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4")}


class Contents(NamedTuple):
    """The arrays of a request's folder, mapped."""

    positions: NDArray[np.int32]
    arrays: dict[Any, NDArray[Any]]  # by site and layer
    layers: int  # of the model


def name_of(key: tuple[str, int] | str) -> str:
    """Return the name of a site and layer in files."""
    return key if isinstance(key, str) else f"{key[0]}.{key[1]}"


def read(folder: str | os.PathLike[str]) -> Contents:
    """Return the captures of a request's folder, mapped. Raise `InvalidRequest` if there are none."""
    arrays: dict[Any, NDArray[Any]] = {}
    positions, layers = np.empty(0, np.int32), 0
    for path in sorted(Path(folder).glob("*" + SUFFIX)):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, HEADER)))
        layers = int(header.pop("__metadata__")["layers"])
        positions = _mapped(path, 8 + length, header.pop("positions"))
        ((name, entry),) = header.items()
        site, dot, layer = name.partition(".")
        arrays[(site, int(layer)) if dot else site] = _mapped(path, 8 + length, entry)
    if not arrays:
        fix = "Pass the folder of one request, such as done.captured.folder"
        raise InvalidRequest("folder", str(folder), "has no captures", fix)
    order = sorted(arrays, key=lambda key: (isinstance(key, str), key))
    return Contents(positions, {key: arrays[key] for key in order}, layers)


def _mapped(path: Path, begin: int, entry: Mapping[str, Any]) -> NDArray[Any]:
    shape, dtype = tuple(entry["shape"]), TYPES[entry["dtype"]]
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", begin + entry["data_offsets"][0], shape)
