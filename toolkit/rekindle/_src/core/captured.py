"""Captured arrays, the numbers inside the model that a request asked for: in parts, whole, and in files."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rekindle._src.core import words
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.positions import END
from rekindle._src.core.taps import SITES, STEER_SITES, STEERED, Steer, digest_of
from rekindle.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pandas import DataFrame

    from rekindle._src.core.pictures import PicturePatch, PictureRun

Key = tuple[str, int] | str  # a site and its layer; "norm" has none

# Captures in files are a folder of safetensors for each request, a file for each site and layer.
PICTURES = "pictures.json"  # and the places of its prompt's pictures, if it has any
HEADER = 504  # bytes of a header, padded with spaces; the array begins after it and its length, at byte 512
SUFFIX = ".safetensors"
_COMPARED = 1 << 20  # positions that are checked at a time
_LARGEST_PICTURES = 1 << 20  # bytes of the places of pictures; one has some 100
TYPES = {"F32": "<f4", "I32": "<i4"}
BACKLOG = 256 << 20  # bytes of one request's captures that may wait for its disk


class CapturedArrays(Protocol):
    """Captures of some positions."""

    @property
    def positions(self) -> NDArray[np.int32]: ...
    @property
    def arrays(self) -> Mapping[Key, NDArray[Any]]: ...


class Backlog:
    """The bytes of one request's captures that wait to be written. While it is full, no step computes more of them."""

    __slots__: tuple[str, ...] = ("_lock", "most", "waiting")

    def __init__(self, most: int = BACKLOG) -> None:
        self.most: int = most
        self.waiting: int = 0
        self._lock: threading.Lock = threading.Lock()

    @property
    def full(self) -> bool:
        """True once `most` bytes wait."""
        return self.waiting >= self.most

    def add(self, count: int) -> None:
        """Add `count` waiting bytes, or subtract them if it is negative. Safe in every thread."""
        with self._lock:
            self.waiting += count


class CapturedPart(NamedTuple):
    """Captured arrays of one row: a line for each of the positions."""

    positions: NDArray[np.int32]
    arrays: Mapping[Key, NDArray[Any]]

    @classmethod
    def joined(cls, parts: Sequence[CapturedPart]) -> CapturedPart:
        """Return the parts of one request, joined one after another."""
        if len(parts) == 1:
            return parts[0]
        import numpy as np

        arrays = {key: np.concatenate([part.arrays[key] for part in parts]) for key in parts[0].arrays}
        return cls(np.concatenate([part.positions for part in parts]), arrays)

    def behind(self, position: int) -> CapturedPart | None:
        """Return the part from a position on; None if it is empty."""
        first = int(self.positions.searchsorted(position))
        if not first:
            return self
        if first == len(self.positions):
            return None
        return CapturedPart(self.positions[first:], {key: array[first:] for key, array in self.arrays.items()})


class Captured(Drawable, Mapping[Any, Any]):
    """Captured arrays by site and layer, `captured["residual", 8]`, each with a line for each of its `positions`.

    A layer may be negative, to count from the last one. The arrays are numpy's: `jax.numpy.asarray` and
    `torch.from_numpy` take them as they are. With `Capture(…, into=…)` they are mapped from the files in `folder`, and
    `Captured.load(folder)` maps them again.
    """

    __slots__ = ("_arrays", "_pictures", "folder", "layers", "positions")

    def __init__(
        self,
        positions: NDArray[np.int32],
        arrays: Mapping[Key, NDArray[Any]],
        layers: int,
        *,
        folder: Path | None = None,
        pictures: Sequence[PictureRun] = (),
    ) -> None:
        self.positions: NDArray[np.int32] = positions
        self.layers: int = layers  # of the model
        self.folder: Path | None = folder
        self._arrays: dict[Any, NDArray[Any]] = dict(arrays)
        self._pictures = tuple(pictures)  # of the prompt

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Captured:
        """Return the captures in the folder of a request, mapped from their files."""
        import json  # `import rekindle` does without these
        import struct

        import numpy as np

        from rekindle._src.core.plain_files import open_plain

        def mapped(path: Path, begin: int, entry: Mapping[str, Any]) -> NDArray[Any]:
            shape, dtype = tuple(entry["shape"]), np.dtype(TYPES[entry["dtype"]])
            if 0 in shape:
                return np.empty(shape, dtype)
            return np.memmap(path, dtype, "r", begin + entry["data_offsets"][0], shape)

        arrays: dict[Key, NDArray[Any]] = {}
        known: NDArray[Any] | None = None
        layers = 0
        for path in sorted(Path(folder).glob("*" + SUFFIX)):
            try:
                with open_plain(path) as file:
                    (length,) = struct.unpack("<Q", file.read(8))
                    header = json.loads(file.read(min(length, HEADER)))
                layers = int(header.pop("__metadata__")["layers"])
                positions = mapped(path, 8 + length, header.pop("positions"))
                if known is None:
                    _check_positions(positions)
                elif not np.array_equal(positions, known):
                    raise ValueError("its positions are not those of the other files")
                known = positions
                ((name, entry),) = header.items()
                site, dot, layer = name.partition(".")
                array = mapped(path, 8 + length, entry)
                if site not in SITES or array.ndim < 2 or len(array) != len(positions):
                    raise ValueError("it has no line of a site for each position")
                arrays[(site, int(layer)) if dot else site] = array
            except Exception as error:  # whatever a stranger's file leads to
                problem = f"has a damaged {path.name} ({type(error).__name__}: {str(error)[:100]})"
                raise InvalidRequest("folder", str(folder), problem, "Capture again, or remove the file") from None
        if known is None:
            fix = "Pass the folder of one request, such as done.captured.folder"
            raise InvalidRequest("folder", str(folder), "has no captures", fix)
        order = sorted(arrays, key=lambda key: (isinstance(key, str), key))
        pictures = _pictures_in(Path(folder) / PICTURES)
        return cls(known, {key: arrays[key] for key in order}, layers, folder=Path(folder), pictures=pictures)

    @classmethod
    def joined(cls, parts: Sequence[CapturedArrays], layers: int, pictures: Sequence[PictureRun] = ()) -> Captured:
        """Return the parts of one request, joined one after another."""
        import numpy as np

        if not parts:
            return cls(np.empty(0, np.int32), {}, layers, pictures=pictures)
        positions, arrays = CapturedPart.joined([CapturedPart(part.positions, part.arrays) for part in parts])
        return cls(positions, arrays, layers, pictures=pictures)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], int) and key[1] < 0:
            key = key[0], key[1] + self.layers
        if key not in self._arrays:
            raise KeyError(f"{key!r} was not captured; there are {', '.join(map(repr, self._arrays)) or 'none'}")
        return self._arrays[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    @property
    def arrays(self) -> Mapping[Key, NDArray[Any]]:
        """The arrays by site and layer."""
        return self._arrays

    @property
    def patches(self) -> dict[int, PicturePatch]:
        """The captured positions that are pictures: the picture, row and column of each, as `Completion.patches`."""
        places = [
            (run, self.positions[slice(*self.positions.searchsorted([run.start, run.stop]))].tolist())
            for run in self._pictures
        ]
        return {position: run.patch(position) for run, positions in places for position in positions}

    def before(self, position: int) -> Captured:
        """Return the part of the positions before this one."""
        count = int(self.positions.searchsorted(position))
        if count == len(self.positions):
            return self
        arrays = {key: array[:count] for key, array in self._arrays.items()}
        return Captured(self.positions[:count], arrays, self.layers, pictures=self._pictures)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays.values())

    def select(self, *, layers: int | Sequence[int] | None = None, positions: object = None) -> Captured:
        """Return the part of some layers, at some positions, such as for `patch`. Positions count over the prompt and
        its output, from 0 on.
        """
        import numpy as np

        chosen = None if layers is None else {layers} if isinstance(layers, int) else {*layers}
        if chosen is not None:
            chosen = {layer + self.layers if layer < 0 else layer for layer in chosen}
        arrays = {
            key: array for key, array in self._arrays.items() if chosen is None or (key != "norm" and key[1] in chosen)
        }
        if positions is None:
            return Captured(self.positions, arrays, self.layers, pictures=self._pictures)
        numbers = np.atleast_1d(np.asarray(positions, np.int32))
        missing = sorted({*numbers.tolist()} - {*self.positions.tolist()})
        if missing:
            known = f"They are {self.positions.min()} to {self.positions.max()}" if len(self.positions) else "None is"
            raise InvalidRequest("positions", missing[0], "was not captured", known)
        places = np.searchsorted(self.positions, np.sort(numbers))
        chosen_arrays = {key: array[places] for key, array in arrays.items()}
        return Captured(np.sort(numbers), chosen_arrays, self.layers, pictures=self._pictures)

    def steers(self) -> tuple[Steer, ...]:
        """Return the changes that put the captured arrays where they came from: what `patch` does."""
        positions = self.positions.tolist()
        if not self._arrays or not positions:
            raise InvalidRequest("patch", self, "has nothing to put in", 'Capture "residual" of some layers')
        wrong = [key for key in self._arrays if key == "norm" or key[0] not in STEER_SITES]
        if wrong:
            raise InvalidRequest("patch", wrong[0], "can't be changed", f"Capture {STEERED}")
        changes: list[tuple[Any, int, NDArray[Any]]] = [
            (*key, array) for key, array in self._arrays.items() if isinstance(key, tuple)
        ]
        return tuple(
            Steer(layer, array, positions=positions, mode="replace", site=site) for site, layer, array in changes
        )

    def to_pandas(self, key: object = None) -> DataFrame:
        """Return one array as a DataFrame with a row for each position, or all of them side by side.

        The columns of all are sorted by site and layer and numbered within them; "norm" has layer -1.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "notebook") from None
        index = pandas.Index(self.positions, name="position")
        if key is not None:
            array = self[key]
            return pandas.DataFrame(array.reshape(len(index), math.prod(array.shape[1:])), index=index)
        if not self._arrays:
            return pandas.DataFrame(index=index)
        parts = sorted(((name, -1) if isinstance(name, str) else name, name) for name in self._arrays)
        columns = [(*part, number) for part, name in parts for number in range(math.prod(self[name].shape[1:]))]
        joined = pandas.concat([self.to_pandas(name) for _, name in parts], axis=1)
        return joined.set_axis(pandas.MultiIndex.from_tuples(columns, names=["site", "layer", "number"]), axis=1)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """Return the arrays as a tree, for treescope where it is installed."""
        from treescope import repr_lib

        return repr_lib.render_dictionary_wrapper(
            object_type=type(self), wrapped_dict=self._arrays, path=path, subtree_renderer=subtree_renderer
        )

    def __repr__(self) -> str:
        arrays = [f"{key_name(key)} {list(array.shape)}" for key, array in self._arrays.items()]
        shown = ", ".join(arrays[:4]) + (f", and {len(arrays) - 4} more" if len(arrays) > 4 else "")
        return f"<Captured: {words.count(len(self.positions), 'position')}, {shown or 'nothing'}>"

    def __str__(self) -> str:
        """Return the repr with a digest of the arrays."""
        return f"{self!r} {digest_of((self.positions, *self._arrays.values()))}"


def _check_positions(positions: NDArray[Any]) -> None:
    """Raise ValueError unless a file's positions ascend, which searches in them rely on. They are read in pieces."""
    if positions.ndim != 1 or positions.dtype.kind != "i":
        raise ValueError("its positions are no list of whole numbers")
    before = -1
    for start in range(0, len(positions), _COMPARED):
        part = positions[start : start + _COMPARED]
        if part[0] <= before or (part[1:] <= part[:-1]).any():
            raise ValueError("its positions do not ascend")
        before = int(part[-1])


def _pictures_in(path: Path) -> tuple[PictureRun, ...]:
    """Return the places of a prompt's pictures from the file in its folder; empty if there is no such file."""
    import json

    from rekindle._src.core.pictures import PictureRun, TokenGrid
    from rekindle._src.core.plain_files import read_plain

    def whole(value: Any) -> int:
        if type(value) is not int or not 0 <= value < END:
            raise ValueError
        return value

    try:
        runs = list[PictureRun]()
        end = 0  # of the run before: a position that many runs had would be counted for each of them
        for entry in json.loads(read_plain(path, _LARGEST_PICTURES)):
            rows, columns, tile = whole(entry["rows"]), whole(entry["columns"]), entry["tile"]
            first, last = whole(entry["start"]), whole(entry["stop"])
            if first < end or not 0 < rows * columns == last - first:
                raise ValueError
            end = last
            grid = TokenGrid(rows, columns, None if tile is None else (whole(tile[0]), whole(tile[1])))
            runs.append(PictureRun(first, last, whole(entry["picture"]), grid))
        return tuple(runs)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        fix = f"Remove its {PICTURES} to read the arrays without it"
        raise InvalidRequest("folder", str(path.parent), f"has a damaged {PICTURES}", fix) from None


def key_name(key: Key) -> str:
    """Return a site and its layer as text."""
    return key if isinstance(key, str) else f"{key[0]} {key[1]}"
