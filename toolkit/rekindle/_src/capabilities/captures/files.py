"""Captures in files: safetensors that grow while a request runs, and are mapped when it has ended.

A request has a folder of its own within the one it names, and each site and layer a file in it. A file has two tensors:
the array, with lines appended as they arrive, followed by their positions. The header is written last, into room
that was left for it; once all of it is on disk the file gets its name: one that ends in ".safetensors" is whole.
Where pictures stand in the prompt is in a file of its own, which comes before them.
All of this waits for a disk, so `capabilities/captures/writer.py` does it in a thread of the request's own.

`read_changes` reads steering, too, from files of this format.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.captures.tapped import NAME_A_FOLDER, RequestTaps
from rekindle._src.core import words
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.captured import HEADER, PICTURES, SUFFIX, TYPES, Captured, CapturedPart, Key
from rekindle._src.core.own_failure import close_each
from rekindle._src.core.pictures import PictureRun
from rekindle._src.core.plain_files import read_plain
from rekindle._src.core.taps import STEER_SITES, Steer
from rekindle.errors import ConfigError, InvalidRequest
from rekindle_kernels import private_files, system

PARTIAL = ".partial"
_LONGEST_NUMBER = 10  # digits of a folder's name
_NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}


def name_of(key: Key) -> str:
    """Return the name of a site and layer in files."""
    return key if isinstance(key, str) else f"{key[0]}.{key[1]}"


class CaptureFiles:
    """The files of one request's captures. Every method may wait for the disk."""

    def __init__(
        self, tapped: RequestTaps, length: int, pictures: Sequence[PictureRun] = (), *, quiet: bool = True
    ) -> None:
        """Make nothing yet. `length` is the most positions of the request, and `pictures` are in its prompt."""
        assert tapped.into is not None, "the request names no folder"
        self.into, self._layers, self._pictures = Path(tapped.into), tapped.layers, tuple(pictures)
        self._expected = sum(max(0, min(stop, length) - start) for start, stop in tapped.wanted)
        self._folder: Path | None = None
        self._files: dict[Key, GrowingFile] = {}
        self._positions: list[NDArray[np.int32]] = []
        self._written = 0
        self._activity = Activity(self.look, quiet=quiet)

    def begin(self) -> None:
        """Make the request's folder. Raise `InvalidRequest` if it can't be made."""
        try:
            self._folder = _new_folder(self.into)
        except (FileExistsError, NotADirectoryError):
            raise InvalidRequest("capture", str(self.into), "is a file, or inside one", NAME_A_FOLDER) from None
        except (OSError, ValueError) as error:  # ValueError: characters that no file system has
            problem = f"can't be written to: {getattr(error, 'strerror', None) or error}"
            raise InvalidRequest("capture", str(self.into), problem, NAME_A_FOLDER) from None

    def add(self, part: CapturedPart) -> None:
        """Append a part of the request's captures. Raise OSError if it can't be written."""
        assert self._folder is not None, "there is no folder before `begin`"
        if not self._files:
            self._activity.start()
        for key, array in part.arrays.items():
            if key not in self._files:
                self._files[key] = GrowingFile(self._folder / f"{name_of(key)}{SUFFIX}", array)
            self._files[key].append(array)
        self._positions.append(part.positions)
        self._written += len(part.positions)

    def finish(self, end: int) -> Captured:
        """Complete the files with the positions before `end`, and return them mapped. Raise OSError."""
        assert self._folder is not None, "there is no folder before `begin`"
        self._activity.stop()
        positions = np.concatenate([np.empty(0, np.int32), *self._positions])
        positions = positions[: np.searchsorted(positions, end)]
        if not self._files:  # nothing was computed
            self.discard()
            return Captured(positions, {}, self._layers)
        if self._pictures:
            _write_pictures(self._folder / PICTURES, self._pictures)
        for key in tuple(self._files):
            self._files[key].finish(positions, name_of(key), {"layers": str(self._layers)})
            del self._files[key]
        for path in (self._folder, self.into, self.into.parent):
            private_files.sync(path)
        return Captured.load(self._folder)

    def discard(self) -> None:
        """Close and remove the files that are not complete, and the folder if nothing else is in it. Never raises."""
        files, self._files = tuple(self._files.values()), {}
        closings = [closing for file in files for closing in (file.close, file.remove)]
        if files and self._pictures:
            closings.append(self._remove_pictures)
        close_each(f"a capture in {self.into}", self._activity.stop, *closings)
        if self._folder is not None:
            with contextlib.suppress(OSError):  # there are complete files in it, or another one took its place
                self._folder.rmdir()

    def _remove_pictures(self) -> None:
        """Remove the file of pictures, unless there are complete files that need it."""
        assert self._folder is not None, "files are in it"
        if not any(self._folder.glob(f"*{SUFFIX}")):
            for name in (PICTURES, PICTURES + PARTIAL):
                (self._folder / name).unlink(missing_ok=True)

    def look(self) -> State:
        """Return the progress as one line, and the share of positions that are written."""
        size = words.mebibytes(sum(file.nbytes for file in tuple(self._files.values())))
        share = self._written / self._expected if self._expected else None
        return State(f"capturing {self._written:,} of {self._expected:,} positions, {size} in {self.into}", share)


def _write_pictures(path: Path, runs: Sequence[PictureRun]) -> None:
    """Write the places of a prompt's pictures, for `Captured.load`."""
    entries = [{"picture": run.picture, "start": run.start, "stop": run.stop, **run.grid._asdict()} for run in runs]
    partial = path.with_name(path.name + PARTIAL)
    partial.write_text(json.dumps(entries))
    private_files.sync(partial)
    system.replace(partial, path)


class GrowingFile:
    """A safetensors file with an array that is appended to."""

    def __init__(self, path: Path, like: NDArray[Any]) -> None:
        self._path, self._shape, self._dtype = path, like.shape[1:], like.dtype.newbyteorder("<")
        self._row = self._dtype.itemsize * int(np.prod(self._shape))
        self._partial = path.with_name(path.name + PARTIAL)
        self._file: BinaryIO = self._partial.open("xb", buffering=0)
        self._write(bytes(8 + HEADER))
        self.nbytes = 0

    def append(self, array: NDArray[Any]) -> None:
        self.nbytes += self._write(memoryview(np.ascontiguousarray(array, self._dtype)).cast("B"))  # type: ignore[arg-type]

    def finish(self, positions: NDArray[np.int32], name: str, metadata: Mapping[str, str]) -> None:
        size = len(positions) * self._row
        self._file.truncate(8 + HEADER + size)
        self._file.seek(0, os.SEEK_END)
        self._write(positions.astype("<i4").tobytes())
        header = json.dumps(
            {
                "__metadata__": dict(metadata),
                name: _entry(_NAMES[self._dtype], (len(positions), *self._shape), 0, size),
                "positions": _entry("I32", positions.shape, size, size + 4 * len(positions)),
            }
        ).encode()
        assert len(header) <= HEADER, "a header has room for the shapes of any site"
        self._file.seek(0)
        self._write(struct.pack("<Q", HEADER) + header.ljust(HEADER))
        self._file.close()
        private_files.sync(self._partial)
        system.replace(self._partial, self._path)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the folder is gone, or a file now
            self._partial.unlink()

    def _write(self, data: bytes | memoryview) -> int:
        """Write all of `data`, although a file system may take only a part at a time. Return the number of bytes."""
        left = memoryview(data)
        while len(left):
            left = left[self._file.write(left) :]
        return len(data)


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _new_folder(into: Path) -> Path:
    """Make and return the first numbered folder that is free."""
    into.mkdir(parents=True, exist_ok=True)
    # Longer names are none of these: one that has no successor would take the place of all.
    numbers = (int(name) for name in os.listdir(into) if name.isdecimal() and len(name) < _LONGEST_NUMBER)
    number = 1 + max(numbers, default=-1)
    while True:
        folder = into / f"{number:05d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # by another process
            number += 1


FLOATS: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
LONGEST_HEADER = 1 << 20  # bytes of a header
LARGEST_CHANGES = 1 << 30  # bytes of a file of vectors
_DIGITS, _SHOWN = 6, 80  # of a layer's number; characters of a text in an error
_NAMING = 'Name each vector by its site and layer, as in safetensors.numpy.save_file({"residual.8": vector}, path)'


def read_changes(path: str | Path) -> tuple[Steer, ...]:
    """Return the changes in a file, in the order of layers. Raise ConfigError if it has none, or can't be read.

    A tensor "residual.8" is the vector of that site and layer, in 16, 32 or 64 bits; the file's metadata may have a
    `mode` and a `scale` of all of them.
    """
    file = Path(path).expanduser()
    try:
        data = read_plain(file, LARGEST_CHANGES)
    except OSError as error:
        raise _wrong(file, f"can't be read: {error.strerror or error}", "Check the path") from None
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > LONGEST_HEADER:
            raise ValueError
        header = json.loads(data[8 : 8 + length])
        metadata = {"mode": "add", "scale": "1", **header.pop("__metadata__", {})}
        vectors = _vectors(memoryview(data)[8 + length :], header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        fix = f"Write vectors in 16, 32 or 64 bits, without bfloat16. {_NAMING}"
        raise _wrong(file, "is no safetensors file of float vectors", fix) from None
    mode, scale = metadata["mode"], metadata["scale"]
    try:
        factor = float(scale)
    except (ValueError, TypeError, OverflowError):
        raise _wrong(file, f"has a scale {str(scale)[:_SHOWN]!r}", "Write a number") from None
    changes = []
    for name, vector in vectors.items():
        site, _, layer = name.partition(".")
        if site not in STEER_SITES or not layer.isdecimal() or len(layer) > _DIGITS or vector.ndim != 1:
            raise _wrong(file, f"has a tensor {name[:_SHOWN]!r} of shape {vector.shape}", _NAMING)
        try:
            changes.append(Steer(int(layer), vector, factor, mode=mode, site=site))
        except InvalidRequest as error:
            raise _wrong(file, f"has a change that can't be: {error}", "Correct it") from None
    if not changes:
        raise _wrong(file, "has no vectors", _NAMING)
    return tuple(sorted(changes, key=lambda change: change.layer))


def _vectors(data: memoryview, header: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file. Raise ValueError if they have more bytes than it, since some are the same ones."""
    vectors, left = dict[str, NDArray[Any]](), len(data)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        left -= end - begin
        if not 0 <= begin <= end <= len(data) or left < 0:
            raise ValueError
        numbers: NDArray[Any] = np.frombuffer(data[begin:end], FLOATS[entry["dtype"]])
        vectors[name] = numbers.reshape(entry["shape"])
    return vectors


def _wrong(file: Path, problem: str, fix: str) -> ConfigError:
    return ConfigError("steering", str(file), problem, fix)
