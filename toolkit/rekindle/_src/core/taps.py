"""Taps: what a request reads of the numbers inside the model, and what it changes there.

A `Capture` and `Steer`s are options of a request, and a `Captured` holds what arrived. `tapped.py` has what the engine
makes of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rekindle._src.core import html, style, svg
from rekindle.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rekindle._src.core.pictures import PicturePatch, PictureRun

Positions = int | Sequence[int] | slice | Literal["prompt", "output"] | None
Layers = int | Sequence[int] | Literal["all"]
Key = tuple[str, int] | str  # a site and its layer; "norm" has none
Mode = Literal["add", "replace", "project_out", "scale"]
Run = tuple[int, int]  # positions, half-open
SteerSite = Literal["residual", "residual_before", "attention", "mlp"]

# Where a layer is read, in the order of the layer. "norm" is the final norm, after all layers.
SITES = ("residual_before", "q", "k", "v", "attention", "experts", "gates", "mlp", "residual", "logits", "norm")
LOGITS = "logits"
MODES: tuple[Mode, ...] = ("add", "replace", "project_out", "scale")
STEER_SITES: tuple[SteerSite, ...] = ("residual", "residual_before", "attention", "mlp")
END = 2**31 - 1
# Captures in files are a folder of safetensors for each request, a file for each site and layer.
PICTURES = "pictures.json"  # and the places of its prompt's pictures, if it has any
HEADER = 504  # bytes of a header, padded with spaces; the array begins after it and its length, at byte 512
SUFFIX = ".safetensors"
TYPES = {"F32": "<f4", "I32": "<i4"}


@dataclasses.dataclass(frozen=True, slots=True)
class Capture(html.Line):
    """The numbers inside the model that a request wants to see.

    `sites` maps each site to its layers: a number, several, or "all"; negative numbers count from the last layer.

    site               | array                      | what it is
    -------------------|----------------------------|----------------------------------------------------------
    "residual"         | [positions, hidden]        | the residual stream after the layer
    "residual_before"  | [positions, hidden]        | the same before it; before layer 0 these are the embeddings
    "attention"        | [positions, hidden]        | the output of the layer's attention module
    "mlp"              | [positions, hidden]        | the output of its MLP, or of its experts
    "q", "k", "v"      | [positions, heads, size]   | as attention takes them: normed and rotated
    "experts", "gates" | [positions, chosen]        | the experts that the router chose, and their weights
    "logits"           | [positions, vocabulary]    | the head's logits of "residual": the logit lens
    "norm"             | [positions, hidden]        | after the final norm; it has no layers: `{"norm": True}`

    `positions` are all positions that are computed: those of the prompt, and of the output but for its last token. Or
    they are numbers, which count from 0, or negative ones from the end of the prompt (-1 is its last token); a slice of
    such numbers; "prompt"; or "output".

    `into` names a folder: then the arrays are written to files in a folder of the request's own within it, and those of
    the completion are mapped from there. Deltas of streams have none.

    With `keep`, captures also stay in host memory (`capture_memory` of `open()`), along with the cached pages of the
    prompt: a later request that captures the same of these pages, with `keep`, gets it without computing them.
    """

    sites: Mapping[str, object]
    positions: Positions = None
    into: str | os.PathLike[str] | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sites, Mapping) or not self.sites:
            fix = 'Pass a dict such as {"residual": [4, 8]}'
            raise InvalidRequest("capture", self.sites, "does not map sites to layers", fix)
        for site, layers in self.sites.items():
            if site not in SITES:
                raise InvalidRequest("capture", site, "is not a site", f"Use one of {', '.join(map(repr, SITES))}")
            layers_of(site, layers, None)
        runs_of("capture", self.positions, None)
        if self.into is not None and not _names_a_folder(self.into):
            raise InvalidRequest("capture", self.into, "is not the name of a folder", "Pass into as a str or a Path")
        if self.into is not None and not isinstance(self.into, str | Path):
            object.__setattr__(self, "into", os.fspath(self.into))  # code of the user's, called once and here
        if not isinstance(self.keep, bool):
            raise InvalidRequest("capture", self.keep, "is not True or False", "Pass keep as a bool")

    def __repr__(self) -> str:
        positions = "" if self.positions is None else f", positions={self.positions!r}"
        into = "" if self.into is None else f", into={os.fspath(self.into)!r}"
        keep = ", keep=True" if self.keep else ""
        return f"Capture({dict(self.sites)!r}{positions}{into}{keep})"


def _names_a_folder(into: Any) -> bool:
    try:
        path = os.fspath(into)
    except Exception:  # a user's class may raise anything
        return False
    return isinstance(path, str) and bool(path) and "\0" not in path


def layers_of(site: str, layers: object, count: int | None) -> tuple[int, ...]:
    """Return layer numbers as a tuple; without a `count` of layers they are only checked for their form."""
    if site == "norm" or layers == "all":
        return ()
    numbers = [layers] if isinstance(layers, int) and not isinstance(layers, bool) else layers
    if isinstance(numbers, str | bytes | Mapping) or not isinstance(numbers, Iterable):
        raise InvalidRequest("capture", {site: layers}, "names no layers", 'Pass numbers such as [4, 8], or "all"')
    return tuple(layer_of("capture", layer, count) for layer in numbers)


def layer_of(name: str, layer: object, count: int | None) -> int:
    """Return a layer's number, counted from 0."""
    number: Any = layer
    try:
        number = number.__index__()
    except AttributeError:
        raise InvalidRequest(name, layer, "is not a layer's number", "Pass an int") from None
    if count is not None and not -count <= number < count:
        raise InvalidRequest(name, layer, f"is not among the model's {count} layers", f"Use 0 to {count - 1}")
    return int(number % count) if count is not None else int(number)


class CapturedArrays(Protocol):
    """Captures of some positions."""

    @property
    def positions(self) -> NDArray[np.int32]: ...
    @property
    def arrays(self) -> Mapping[Key, NDArray[Any]]: ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Steer(html.Line):
    """A change of the residual stream at one layer, or of the output of its attention or MLP.

    `mode` "add" adds `scale · vector`, and "replace" puts it in the place of what was there. "project_out" removes
    `scale` times the component along `vector`. "scale" multiplies by `scale`: the component along `vector`, or all
    that is there if no vector is given.

    `vector` has one number for each of the model's `hidden_size`, or one such row for each of the `positions`, which
    have an end then. `positions` are as those of `Capture`; None is all of them. `site` is "residual", after the
    layer, "residual_before", or "attention" or "mlp", whose outputs are changed before they are added to the residual
    stream. Several changes of one position are made in their order.
    """

    layer: int
    vector: Any = None
    scale: float = 1.0
    positions: Positions = None
    mode: Mode = "add"
    site: SteerSite = "residual"

    def __post_init__(self) -> None:
        layer_of("steer", self.layer, None)
        if self.mode not in MODES:
            raise InvalidRequest("steer", self.mode, "is not a mode", f"Use one of {', '.join(map(repr, MODES))}")
        if self.site not in STEER_SITES:
            raise InvalidRequest("steer", self.site, "can't be changed", f"Use {_SITES_TO_STEER}")
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float) or not math.isfinite(self.scale):
            raise InvalidRequest("steer", self.scale, "is not a finite number", "Pass scale as a float")
        runs_of("steer", self.positions, None)
        if self.vector is None:
            if self.mode != "scale":
                raise InvalidRequest("steer", None, f"is no vector, which mode={self.mode!r} needs", "Pass one")
            return
        import numpy as np  # `import rekindle` does without it

        try:
            vector = np.array(self.vector, np.float32)
        except Exception:
            raise InvalidRequest("steer", self.vector, "is not a vector", "Pass an array of numbers") from None
        if vector.ndim not in (1, 2) or not vector.size or not np.isfinite(vector).all():
            problem = f"of shape {vector.shape} is not a vector of finite numbers"
            raise InvalidRequest("steer", vector, problem, "Pass [hidden_size] numbers, or a row for each position")
        if self.mode in ("project_out", "scale") and not np.linalg.norm(vector, axis=-1).all():
            raise InvalidRequest("steer", vector, "is zero, so that it has no direction", "Pass another vector")
        vector.setflags(write=False)
        object.__setattr__(self, "vector", vector)

    def __repr__(self) -> str:
        shape = "" if self.vector is None else f", vector of {'×'.join(map(str, self.vector.shape))}"
        where = "" if self.positions is None else f", positions={self.positions!r}"
        where += "" if self.site == "residual" else f", site={self.site!r}"
        return f"Steer(layer={self.layer}{shape}, scale={self.scale:g}, mode={self.mode!r}{where})"

    def __str__(self) -> str:
        """Return the repr with a digest of the vector: `session.map` tells options apart by their texts."""
        return f"{self!r} {_digest_of((self.vector,))} {self.site}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steer) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        vector = b"" if self.vector is None else self.vector.tobytes()
        return self.layer, vector, self.scale, repr(self.positions), self.mode, self.site


SteerLike = Steer | str | Mapping[str, float]  # a name of the session's, or names and the factors of their scales
_SITES_TO_STEER = f"{', '.join(map(repr, STEER_SITES[:-1]))} or {STEER_SITES[-1]!r}"


def position_of(name: str, position: Any, prompt_length: int | None) -> int:
    try:
        number = int(position.__index__())
    except AttributeError:
        problem = "is no position"
        raise InvalidRequest(name, position, problem, "Pass ints, a slice, 'prompt' or 'output'") from None
    if prompt_length is None or number >= 0:
        return number
    if number < -prompt_length:
        problem = f"is before the prompt, which has {prompt_length} tokens"
        raise InvalidRequest(name, number, problem, f"Use {-prompt_length} or more")
    return number + prompt_length


def runs_of(name: str, positions: Positions, prompt_length: int | None) -> tuple[Run, ...]:
    """Return positions as runs, in their order. Without a prompt they are only checked for their form."""
    length = 1 if prompt_length is None else prompt_length
    match positions:
        case None:
            return ((0, END),)
        case "prompt":
            return ((0, length),)
        case "output":
            return ((length, END),)
        case slice():
            if positions.step not in (None, 1):
                raise InvalidRequest(name, positions, "has a step", "Pass the positions as numbers")
            start = 0 if positions.start is None else position_of(name, positions.start, prompt_length)
            stop = END if positions.stop is None else position_of(name, positions.stop, prompt_length)
            return ((start, stop),) if start < stop else ()
    numbers = [positions] if hasattr(positions, "__index__") else positions
    if isinstance(numbers, str | bytes | Mapping) or not isinstance(numbers, Iterable):
        fix = "Pass ints, a slice, 'prompt' or 'output'"
        raise InvalidRequest(name, positions, "are no positions", fix)
    runs: list[Run] = []
    for number in sorted({position_of(name, position, prompt_length) for position in numbers}):
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return tuple(runs)


class Captured(Mapping[Any, Any]):
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
        positions, layers = np.empty(0, np.int32), 0
        for path in sorted(Path(folder).glob("*" + SUFFIX)):
            try:
                with open_plain(path) as file:
                    (length,) = struct.unpack("<Q", file.read(8))
                    header = json.loads(file.read(min(length, HEADER)))
                layers = int(header.pop("__metadata__")["layers"])
                positions = mapped(path, 8 + length, header.pop("positions"))
                ((name, entry),) = header.items()
                site, dot, layer = name.partition(".")
                arrays[(site, int(layer)) if dot else site] = mapped(path, 8 + length, entry)
            except Exception as error:  # whatever a stranger's file leads to
                problem = f"has a damaged {path.name} ({type(error).__name__}: {str(error)[:100]})"
                raise InvalidRequest("folder", str(folder), problem, "Capture again, or remove the file") from None
        if not arrays:
            fix = "Pass the folder of one request, such as done.captured.folder"
            raise InvalidRequest("folder", str(folder), "has no captures", fix)
        order = sorted(arrays, key=lambda key: (isinstance(key, str), key))
        pictures = _pictures_in(Path(folder) / PICTURES)
        return cls(positions, {key: arrays[key] for key in order}, layers, folder=Path(folder), pictures=pictures)

    @classmethod
    def joined(cls, parts: Sequence[CapturedArrays], layers: int, pictures: Sequence[PictureRun] = ()) -> Captured:
        """Return the parts of one request, joined one after another."""
        import numpy as np

        if not parts:
            return cls(np.empty(0, np.int32), {}, layers, pictures=pictures)
        if len(parts) == 1:
            return cls(parts[0].positions, parts[0].arrays, layers, pictures=pictures)
        arrays = {key: np.concatenate([part.arrays[key] for part in parts]) for key in parts[0].arrays}
        return cls(np.concatenate([part.positions for part in parts]), arrays, layers, pictures=pictures)

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
        """Return the part of some layers, at some positions, such as for `patch`. Positions are those of the prompt and
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
            raise InvalidRequest("patch", wrong[0], "can't be changed", f"Capture {_SITES_TO_STEER}")
        changes: list[tuple[Any, int, NDArray[Any]]] = [
            (*key, array) for key, array in self._arrays.items() if isinstance(key, tuple)
        ]
        return tuple(
            Steer(layer, array, positions=positions, mode="replace", site=site) for site, layer, array in changes
        )

    def to_pandas(self, key: object = None) -> Any:
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
        arrays = [f"{_name(key)} {list(array.shape)}" for key, array in self._arrays.items()]
        shown = ", ".join(arrays[:4]) + (f", and {len(arrays) - 4} more" if len(arrays) > 4 else "")
        return f"<Captured: {html.count(len(self.positions), 'position')}, {shown or 'nothing'}>"

    def __str__(self) -> str:
        """Return the repr with a digest of the arrays."""
        return f"{self!r} {_digest_of((self.positions, *self._arrays.values()))}"

    def _repr_html_(self) -> str:
        rows = [
            (_name(key), "×".join(map(str, array.shape)), _along(array), *_spread(array), str(array.dtype))
            for key, array in self._arrays.items()
        ]
        seen = len(self.patches)
        positions = html.count(len(self.positions), "position") + (f", {seen} of them of pictures" if seen else "")
        size = html.line(positions, html.mebibytes(self.nbytes))
        heads = ["captured", "shape", "size along the positions", "mean", "deviation", "dtype"]
        return str(html.block(html.table(heads, rows), size))


def _pictures_in(path: Path) -> tuple[PictureRun, ...]:
    """Return the places of a prompt's pictures from the file in its folder; none if there is no such file."""
    import json

    from rekindle._src.core.pictures import PictureRun, TokenGrid

    def whole(value: Any) -> int:
        if type(value) is not int or not 0 <= value < END:
            raise ValueError
        return value

    try:
        runs = []
        for entry in json.loads(path.read_bytes()):
            rows, columns, tile = whole(entry["rows"]), whole(entry["columns"]), entry["tile"]
            first, last = whole(entry["start"]), whole(entry["stop"])
            if not 0 < rows * columns == last - first:
                raise ValueError
            grid = TokenGrid(rows, columns, None if tile is None else (whole(tile[0]), whole(tile[1])))
            runs.append(PictureRun(first, last, whole(entry["picture"]), grid))
        return tuple(runs)
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError, IndexError):
        fix = f"Remove its {PICTURES} to read the arrays without it"
        raise InvalidRequest("folder", str(path.parent), f"has a damaged {PICTURES}", fix) from None


def _digest_of(arrays: Iterable[Any]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(b"" if array is None else array.tobytes())
    return state.hexdigest()


_DRAWN = 120  # positions of a picture at most, each of which is then the mean of several


def _along(array: NDArray[Any]) -> html.Markup:
    """Return the root mean square of each position's values as a line; empty if there is one position, or no number."""
    if array.ndim < 2 or len(array) < 2 or not array.size:
        return html.Markup("")
    count = min(_DRAWN, len(array))
    bounds = [len(array) * place // count for place in range(count + 1)]
    parts = (array[start:stop].astype("float32") for start, stop in itertools.pairwise(bounds))
    sizes = [math.sqrt(float((part * part).mean())) for part in parts]
    highest = max(sizes)
    if not math.isfinite(highest) or highest <= 0:
        return html.Markup("")
    width, height = 120, 18
    points = [
        (width * place / max(1, len(sizes) - 1), height - 1 - (height - 2) * size / highest)
        for place, size in enumerate(sizes)
    ]
    label = f"root mean square along the positions, at most {highest:.3g}"
    return svg.picture(width, height, [svg.stroke(points, style.BLUE)], label=label)


def _spread(array: NDArray[Any]) -> tuple[float, float]:
    return (float(array.mean()), float(array.std())) if array.size else (0.0, 0.0)


def _name(key: Key) -> str:
    return key if isinstance(key, str) else f"{key[0]} {key[1]}"
