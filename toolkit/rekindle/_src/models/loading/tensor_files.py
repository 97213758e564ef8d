"""safetensors files: finds a folder's files, checks headers against sizes, reads tensors into given memory.

The reader is our own, because loading needs the bytes in memory that already is the final array.
Measured on 537 MB of float32:
`safetensors.safe_open` peaked at 1025 MiB resident, since mapped pages count in addition to the arrays, and took 0.21 s
of CPU time (1.1 s with a copy into aligned memory); reading straight into the arrays peaked at 512 MiB and took 0.07 s.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.json_values import count_values
from rekindle._src.core.plain_files import open_plain, read_plain
from rekindle.errors import CheckpointError

if TYPE_CHECKING:
    from rekindle._src.models.loading.manifest import Source

T = TypeVar("T")


class TensorFacts(Protocol):
    """A tensor, or a description of one."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def nbytes(self) -> int: ...


DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
    "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
WHOLE = frozenset(("I64", "I32"))
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
ALIGNMENT = 64
_MAX_HEADER = 100_000_000  # the format's own limit
MAX_VALUES = 1 << 22  # of JSON; an index of 100,000 tensors has 200,000, and a header of as many 1,200,000
MAX_NAME = 1 << 10  # bytes of a tensor's name: the longest published ones have some 150
MAX_DIMENSIONS = 8  # of a tensor: the product of a million of them takes minutes
MOST_LISTED = 12  # listed one by one; a broken or hostile checkpoint can have hundreds of thousands
_WIDTH = 200  # characters of one of them; the names in a file can have any length
PIECE = 16 << 20  # bytes of float32 that are in memory at a time
_FILE_NAME = re.compile(r"[^/\\:\0]*\.safetensors")  # in the folder itself: no path, drive or stream
ReadRows = Callable[[int, int], NDArray[np.float32]]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorEntry(NamedTuple):
    """One tensor's place in a file.

    A tensor that is not stored as plain numbers has `rows`, which reads the rows [start, stop) as float32.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte within the file
    nbytes: int
    rows: ReadRows | None = None

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of its values when they are read."""
        return np.dtype(np.float32 if self.rows is not None else DTYPES[self.dtype])

    @property
    def has_numbers(self) -> bool:
        """True if it can be read as floating-point numbers."""
        return self.rows is not None or self.dtype in FLOATS


class Header(NamedTuple):
    """The header of one file: its tensors, metadata, and the input of a fingerprint."""

    file: Path
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    raw: bytes  # the header itself, or a digest of one that is long
    size: int


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, sorted by name. Raise `CheckpointError` if any is missing."""
    if not folder.is_dir():
        part = folder.suffix in (".safetensors", ".json", ".jinja", ".model")  # of a checkpoint
        problem = "is a file; pass the folder it lies in" if part else "is a file and no GGUF file; check the path"
        problem = problem if folder.exists() else "does not exist; check the path"
        raise CheckpointError(f"{folder} {problem}.")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _indexed(folder, index)
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter")))
    if files:
        return files
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights as {pickles[0]}: a pickle can run any code while it is read, so rekindle does "
            "not open it. Convert it where you trust it: transformers' model.save_pretrained(folder)."
        )
    raise CheckpointError(f"{folder} has no *.safetensors file. Pass the folder of a Hugging Face checkpoint.")


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(_parsed(read_plain(index, _MAX_HEADER))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} can't be read as an index ({error!r}). Download it again.") from error
    outside = [name for name in names if not isinstance(name, str) or not _FILE_NAME.fullmatch(name)]
    if outside:
        raise CheckpointError(
            f"{index.name} names files outside of its folder, or no files: {listed([repr(name) for name in outside])}. "
            "Don't open this checkpoint, unless you know why it does that and have corrected the index."
        )
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that {index.name} lists: "
            f"{listed(missing, ', ')}. Download them."
        )
    return [folder / name for name in names]


def read_json(path: Path, kind: type[T], most: int) -> T:
    """Return the content of a file of at most `most` bytes. Raise `CheckpointError` unless it is a dict, or a list."""
    try:
        content = _parsed(read_plain(path, most))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read ({error}). Download it again.") from error
    if not isinstance(content, kind):
        expected = "an object" if kind is dict else f"a {kind.__name__}"
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not {expected}. Download it again.")
    return content


def _parsed(content: bytes, most: int = MAX_VALUES) -> Any:
    """Return the value of a JSON text. Raise ValueError for more values than there may be, before they are made."""
    if count_values(content, most, most).values > most:
        raise ValueError(f"it has more than {most:,} values")
    return json.loads(content.decode("utf-8-sig"))  # bytes in UTF-16 would be other values than were counted


def read_headers(paths: Iterable[Path]) -> tuple[Header, ...]:
    """Return the headers of a model's files. Bounds hold for all of them together, since one file may have many names.

    Raise `CheckpointError` for a broken one.
    """
    headers, size, values = list[Header](), 0, 0
    for path in paths:
        headers.append(read_header(path, _MAX_HEADER - size, most_values=MAX_VALUES - values))
        size += len(headers[-1].raw)
        values += count_values(headers[-1].raw, MAX_VALUES, MAX_VALUES).values
    return tuple(headers)


def read_header(path: Path, most: int = _MAX_HEADER, *, most_values: int = MAX_VALUES) -> Header:
    """Return the header of one file, of at most `most` bytes and `most_values` values.

    Raise `CheckpointError` if it is longer, truncated, inconsistent or of another format.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            raw = file.read(length) if len(start) == 8 and length <= min(size - 8, most) else b""
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error}). Check the file.") from error
    if start == b"version ":
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights. Run: git lfs pull")
    if most < length <= size - 8:
        raise CheckpointError(
            f"{path} has a header of {length:,} bytes, and at most {most:,} are read. Check the file."
        )
    if not raw:
        raise broken(path, f"its header needs {length + 8:,} bytes and the file has {size:,}")
    try:
        fields = _parsed(raw, most_values)
        metadata = fields.pop("__metadata__", None) or {}
        entries = tuple(_entry(path, name, value, 8 + length) for name, value in fields.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(path, f"its header makes no sense ({repr(error)[:_WIDTH]})") from error
    needed = max((entry.offset + entry.nbytes for entry in entries), default=0)
    if needed > size:
        raise broken(path, f"its tensors need {needed:,} bytes and the file has {size:,}")
    placed = sorted((entry for entry in entries if entry.nbytes), key=lambda entry: entry.offset)
    for before, after in itertools.pairwise(placed):
        if before.offset + before.nbytes > after.offset:  # a small file would be many large tensors
            raise broken(path, f"{after.name[:_WIDTH]} lies on {before.name[:_WIDTH]}")
    return Header(path, entries, metadata, raw, size)


def _entry(path: Path, name: str, value: dict[str, Any], base: int) -> TensorEntry:
    if len(name.encode(errors="surrogatepass")) > MAX_NAME:
        raise ValueError(f"a name of {len(name):,} characters, {name[:40]!r}…, and at most {MAX_NAME:,} bytes are read")
    start, stop = value["data_offsets"]
    shape, dtype = tuple(value["shape"]), value["dtype"]
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name}: {len(shape):,} dimensions, and at most {MAX_DIMENSIONS} are read")
    if not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in (start, stop, *shape)):
        raise ValueError(f"{name}: shape {str(shape)[:_WIDTH]}, offsets {str(start)[:24]}:{str(stop)[:24]}")
    if dtype in DTYPES and stop - start != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise ValueError(f"{name}: {dtype} {list(shape)} does not fill {stop - start} bytes")
    return TensorEntry(name, path, dtype, shape, base + start, stop - start)


def read_into(entry: TensorEntry, start: int, out: NDArray[Any]) -> None:
    """Fill the contiguous `out` with the tensor's bytes from byte `start` on; the GIL is free while it reads."""
    read_exactly(entry.file, entry.name, entry.offset + start, out)


def views(header: Header, content: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file as views of its `content`."""
    return {
        entry.name: content[entry.offset : entry.offset + entry.nbytes].view(entry.numpy_dtype).reshape(entry.shape)
        for entry in header.entries
    }


def write(
    path: Path,
    described: Mapping[str, TensorFacts],
    arrays: Iterable[NDArray[Any]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file. `described` has each tensor's dtype, shape and nbytes.

    `arrays` yields them in order, each whole or as several pieces. The first tensor begins at a multiple of
    `ALIGNMENT`. The format allows no gaps between tensors.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in described.items():
        header[name] = {
            "dtype": _NAMES[np.dtype(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    with path.open("wb", buffering=0) as file:
        write_data(file, memoryview(len(raw).to_bytes(8, "little") + raw))
        for array in arrays:
            write_data(file, array.reshape(-1).view(np.uint8).data)


def write_data(file: io.FileIO, data: memoryview) -> None:
    """Write all of it: one call writes at most 2 GiB."""
    while data:
        data = data[file.write(data) :]


def rows_of(entry: TensorEntry, start: int, stop: int) -> NDArray[Any]:
    """Return the rows [start, stop) of a tensor, as stored or, where they are no plain numbers, in float32."""
    if entry.rows is not None:
        return entry.rows(start, stop)
    values = np.empty((stop - start, *entry.shape[1:]), entry.numpy_dtype)
    read_into(entry, start * (entry.nbytes // max(1, entry.shape[0])), values)
    return values


def pieces_of(entry: TensorEntry, source: Source, multiple: int = 1) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Yield a tensor's rows in the final form that `source` describes, in pieces: start, stop and values of each.

    Pieces begin at multiples of `multiple` rows. A tensor that has to be transposed comes in one piece.
    """
    count = entry.shape[0]
    if source.transpose:
        yield 0, entry.shape[1], _final(rows_of(entry, 0, count).T, source)
        return
    row = 4 * math.prod(entry.shape[1:])
    step = max(1, PIECE // max(1, row * multiple)) * multiple
    for start in range(0, count, step):
        stop = min(count, start + step)
        yield start, stop, _final(rows_of(entry, start, stop), source)


def _final(values: NDArray[Any], source: Source) -> NDArray[Any]:
    return values.astype(np.float32) + np.float32(source.add) if source.add else values


def read_exactly(path: Path, name: str, offset: int, out: NDArray[Any]) -> None:
    """Fill the contiguous `out` with a file's bytes from `offset` on; the GIL is free while it reads.

    Raise `CheckpointError`, with `name` in its message, if the file can't be read or ends before.
    """
    rest = out.reshape(-1).view(np.uint8).data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise broken(path, f"it ends {len(rest):,} bytes early within {name}")
                rest = rest[count:]
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error}). Check the disk, or copy it again.") from error


def broken(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file with unexpected content."""
    return CheckpointError(f"{path} is truncated or corrupt: {problem}. Download or copy it again.")


def listed(found: Sequence[str], separator: str = "; ") -> str:
    """Return the first differences, each cut to a line's length, and the number of the others."""
    shown = [text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..." for text in found[:MOST_LISTED]]
    more = len(found) - len(shown)
    return separator.join([*shown, f"and {more:,} more"] if more else shown)
