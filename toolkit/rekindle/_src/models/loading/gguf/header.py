"""The header of a GGUF file: its metadata, and where each tensor lies. Nothing of the weights is read.

    "GGUF", version, numbers of tensors and of keys · keys and values · names, shapes, types and offsets · the tensors

All numbers are little-endian; shapes are stored with the fastest axis first, and here, as in numpy, with the slowest.
Metadata has typed values by key, and errors that name the key.

The file is read in order, piece by piece as far as the header goes, and none of its counts is trusted: each is compared
with the bytes that are left in the file before anything is allocated for it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.memory import give_back
from rekindle._src.core.plain_files import open_plain
from rekindle._src.models.loading.gguf.blocks import PRISM_NAMES, PRISM_TYPES, TYPES, UNREAD, BlockType
from rekindle._src.models.loading.gguf.files import MAGIC
from rekindle.errors import CheckpointError

MAX_HEADER = 256 << 20  # bytes; a vocabulary of 256,000 tokens with its merges takes some 15 MB
MAX_TEXTS = 1 << 22  # strings of one array
MAX_TENSORS = MAX_KEYS = 1 << 16  # of a file: the largest published ones have some 2,000 tensors and 100 keys
STEP = 4 << 20
_LENGTH = struct.Struct("<Q")
WINDOW = 1 << 20  # bytes that are searched for strings at once


class Texts(Sequence[str]):
    """An array of strings, decoded when they are read."""

    def __init__(self, content: bytes, starts: NDArray[np.int32], ends: NDArray[np.int32]) -> None:
        self.content = content  # of the array: a length of 8 bytes before each string
        self.starts, self.ends = starts, ends  # of the strings in it

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return list(self)[index]
        return self.content[self.starts[index] : self.ends[index]].decode()

    def __iter__(self) -> Iterator[str]:
        content = self.content
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            yield content[start:end].decode()

    def equal_to(self, strings: Iterable[str], among: NDArray[np.int64]) -> list[int]:
        """Return the indices of `among` with a string among `strings`, ascending, without decoding any."""
        octets, lengths, matches = np.frombuffer(self.content, np.uint8), self.ends - self.starts, list[int]()
        for encoded in {string.encode() for string in strings}:
            left = among[lengths[among] == len(encoded)]
            for at, octet in enumerate(encoded):
                left = left[octets[self.starts[left] + at] == octet]
            matches += left.tolist()
        return sorted(matches)


class PassedTexts(Texts):
    """An array of strings that was passed over: only their number is known."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class Cursor:
    """A position in the header of a file. `reading` names the current part for errors.

    Of an `outline` arrays of strings are passed over: a vocabulary is nine tenths of a header, and of its time.
    """

    def __init__(self, path: Path, file: BinaryIO, most: int, *, outline: bool = False) -> None:
        self.path, self.position, self.reading, self._most = path, 0, "its header", most
        self.outline = outline
        self.size = os.fstat(file.fileno()).st_size
        self._file, self._buffer = file, bytearray()

    @property
    def left(self) -> int:
        """The bytes of the file after the position."""
        return self.size - self.position

    def digest(self) -> bytes:
        """Return a digest of the header up to the position."""
        with memoryview(self._buffer) as view:
            return hashlib.blake2b(view[: self.position]).digest()

    def broken(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated or corrupt: {self.reading}: {problem}. Download or copy it again."
        )

    def skip(self, count: int) -> int:
        """Pass over bytes, which are in the buffer then; return where they begin."""
        start = self.position
        if count > self.left:
            raise self.broken(f"needs {_amount(count)} bytes, and {self.left:,} are left in the file")
        self._fill(start + count)
        self.position += count
        return start

    def number(self, form: str) -> Any:
        """Return a number of one of `struct`'s forms, such as "Q"."""
        start = self.skip(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._buffer, start)[0]

    def fields(self, form: struct.Struct) -> tuple[int, ...]:
        """Return the numbers of a form, one after the other."""
        return form.unpack_from(self._buffer, self.skip(form.size))

    def count(self, least: int, what: str, most: int = 1 << 62) -> int:
        """Read a count of items, each of at least `least` bytes. Raise `CheckpointError` if they can't fit."""
        items = int(self.number("Q"))
        if items > self.left // least:
            raise self.broken(f"{_amount(items)} {what} don't fit into the {self.left:,} bytes that are left")
        if items > most:
            raise self.broken(f"{_amount(items)} {what} are there, and at most {most:,} are read")
        return items

    def text(self, most: int = MAX_HEADER) -> str:
        """Return a string. Raise `CheckpointError` if it is longer than `most` bytes, or not UTF-8."""
        length = self.count(1, "bytes of a string", most)
        start = self.skip(length)
        try:
            return self._buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"is not UTF-8 ({error.reason})") from None

    def texts(self) -> Texts:
        """Read a count and an array of strings."""
        count = self.count(8, "strings", MAX_TEXTS)
        first, pieces, left, batch = self.position, [np.empty(0, np.int64)], count, 256
        while left:
            pieces.append(self._seen(left))
            left -= len(pieces[-1])
            if left and self.left >= 8 and len(pieces[-1]) < 1024:  # the search stopped where only lengths lead on
                pieces.append(self._followed(min(left, batch), count - left))
                left, batch = left - len(pieces[-1]), batch * 2
            elif not len(pieces[-1]):
                raise self.broken(f"string {count - left:,} needs 8 bytes, and {self.left:,} are left in the file")
        if self.outline:
            return PassedTexts(count)
        starts = (np.concatenate(pieces) - first).astype(np.int32)
        content = bytes(self._buffer[first : self.position])
        ends = np.append(starts[1:] - 8, np.int32(len(content)))[: len(starts)]
        try:
            if not content.isascii():  # lengths count as ASCII: no character spans one
                bare, lengths = bytearray(content), ends - starts
                for start in starts[lengths >= 128].tolist():
                    bare[start - 8 : start] = bytes(8)
                bare.decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"holds a string that is not UTF-8 ({error.reason})") from None
        return Texts(content, starts, ends)

    def _seen(self, most: int) -> NDArray[np.int64]:
        """Pass over strings, at most `most`, that one search finds; return where they begin.

        Each begins after the zeros of its length, and the lengths have to lead from one to the next: an empty string,
        or one with zeros in it, ends the search.
        """
        first = self.position
        window = np.frombuffer(self._buffer, np.uint8, min(WINDOW, self._fill_some(WINDOW)), first)
        if len(window) < 8:  # the file ends here
            return np.empty(0, np.int64)
        # Of the seven zeros in the length of a short string, four are an aligned word; up to three follow it.
        aligned = -first % 4
        words = np.frombuffer(self._buffer, "<u4", max(0, len(window) - aligned - 4) // 4, first + aligned)
        starts = 4 * np.flatnonzero(words == 0)[:most] + (aligned + 4)
        more = window[starts] == 0
        for _ in range(3):
            starts += more
            more &= window[np.minimum(starts, len(window) - 1)] == 0
        starts = starts[starts < len(window)]
        if not len(starts) or starts[0] != 8:
            return np.empty(0, np.int64)
        lengths = np.ndarray((len(window) - 7,), "<u8", window, strides=(1,))[starts - 8]
        del window, words  # the buffer grows
        leads = starts[:-1] + lengths[:-1].astype(np.int64) + 8 == starts[1:]
        count = len(starts) if leads.all() else int(np.argmin(leads)) + 1
        last = first + int(starts[count - 1])
        if int(lengths[count - 1]) > self.size - last:
            count -= 1  # `_followed`, which takes it next, raises its error
            if not count:
                return np.empty(0, np.int64)
            last = first + int(starts[count - 1])
        self.position = last
        self.skip(int(lengths[count - 1]))
        return first + starts[:count]

    def _followed(self, count: int, number: int) -> NDArray[np.int64]:
        """Pass over `count` strings, from this one on, by the length of each; return where they begin."""
        position, filled, starts = self.position, len(self._buffer), list[int]()
        for _ in range(count):  # only calls that are needed
            if position + 8 > filled:
                filled = self._fill(position + 8)
            length = _LENGTH.unpack_from(self._buffer, position)[0]
            starts.append(position + 8)
            position += 8 + length
            if position > self.size:
                where = number + len(starts) - 1
                raise self.broken(f"string {where:,} needs {_amount(length)} bytes, more than the file has")
        self._fill(position)
        self.position = position
        return np.array(starts, np.int64)

    def numbers(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Read a count and an array of numbers."""
        count = self.count(dtype.itemsize, "numbers")
        start = self.skip(count * dtype.itemsize)
        return np.frombuffer(bytes(self._buffer[start : self.position]), dtype)

    def _fill_some(self, most: int) -> int:
        """Read `most` bytes from the position on, or the rest of the file; return how many are there."""
        return self._fill(min(self.position + most, self.size, max(self.position, self._most))) - self.position

    def _fill(self, wanted: int) -> int:
        """Read until `wanted` bytes are in the buffer; return how many are there."""
        if wanted > self._most:
            raise self.broken(f"the header is longer than the {self._most >> 20} MiB that are read")
        while len(self._buffer) < wanted:
            data = self._file.read(max(STEP, wanted - len(self._buffer)))
            if not data:
                raise self.broken(f"the file ends after {len(self._buffer):,} bytes")
            self._buffer += data
        return len(self._buffer)


def _amount(count: int) -> str:
    return f"{count:,}" if count < 1 << 50 else f"{count:.2e}"


VERSIONS = (2, 3)  # they are read alike; version 1 had counts of 32 bits
ALIGNMENT = 32  # unless general.alignment says otherwise
MAX_NAME = 1 << 10  # bytes; llama.cpp's own limit is 64
_MAX_DIMENSIONS = 4
_PLACES = [struct.Struct(f"<{dimensions}QIQ") for dimensions in range(_MAX_DIMENSIONS + 1)]  # shape, type and offset
_OLDER = (b"lmgg", b"tjgg", b"algg", b"fmgg")  # the formats before GGUF, as their bytes lie in the file
Value = int | float | bool | str | Texts | np.ndarray[Any, Any]
MAX_KEY = 1 << 16  # bytes; the format's own limit
D = TypeVar("D")
_MISSING: Any = object()
# The numbers that stand for the types of values: struct's letter and numpy's dtype.
_NUMBERS = {
    0: ("B", "u1"), 1: ("b", "i1"), 2: ("H", "<u2"), 3: ("h", "<i2"), 4: ("I", "<u4"), 5: ("i", "<i4"),
    6: ("f", "<f4"), 10: ("Q", "<u8"), 11: ("q", "<i8"), 12: ("d", "<f8"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
CONTROL = 3  # in tokenizer.ggml.token_type
ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
     "<EOT>", "_<EOT>", "<|end_of_turn|>")
)  # fmt: skip
HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))  # where a vocabulary has both, <|end|> ends a message only


class Metadata(Mapping[str, Value]):
    """The values of a file by their keys. Floats of 32 bits are the shortest decimals that they stand for."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = dict(values)

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str, default: D = _MISSING) -> int | D:
        """Return a whole number, or `default` if the key is absent. Raise `CheckpointError` if there is no default."""
        return self._of(key, "a whole number", default, lambda value: type(value) is int)

    def number(self, key: str, default: D = _MISSING) -> float | D:
        """Return a number, as a float."""
        value = self._of(key, "a number", default, lambda value: type(value) in (int, float))
        return float(value) if isinstance(value, int) else value

    def flag(self, key: str, default: D = _MISSING) -> bool | D:
        """Return the value of a key that has to be a boolean."""
        return self._of(key, "true or false", default, lambda value: type(value) is bool)

    def text(self, key: str, default: D = _MISSING) -> str | D:
        """Return the value of a key that has to be a string."""
        return self._of(key, "a string", default, lambda value: isinstance(value, str))

    def texts(self, key: str, default: D = _MISSING) -> Texts | D:
        """Return the value of a key that has to be an array of strings."""
        return self._of(key, "an array of strings", default, lambda value: isinstance(value, Texts))

    def numbers(self, key: str, default: D = _MISSING) -> NDArray[Any] | D:
        """Return an array of numbers."""
        return self._of(key, "an array of numbers", default, lambda value: isinstance(value, np.ndarray))

    def _of(self, key: str, kind: str, default: Any, fits: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(
                    f"{self.path} has no {key} in its metadata ({kind}). Download it again, or convert it anew."
                )
            return default
        if not fits(value):
            shown = repr(value) if isinstance(value, (int, float, bool)) else f"a {type(value).__name__}"
            raise CheckpointError(f"{self.path}: {key} is {shown[:80]}, not {kind}. Download it again.")
        return value


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Read `count` keys and values."""
    values = dict[str, Value]()
    for number in range(count):
        cursor.reading = f"key {number + 1:,} of its metadata"
        key = cursor.text(MAX_KEY)
        cursor.reading = f"the metadata's {key[:100]!r}"
        if key in values:
            raise cursor.broken("is there twice")
        values[key] = _value(cursor, cursor.number("I"))
    return Metadata(cursor.path, values)


def _value(cursor: Cursor, kind: int) -> Value:
    if kind in _NUMBERS:
        number = cursor.number(_NUMBERS[kind][0])
        return float(str(np.float32(number))) if kind == 6 else number
    if kind == _BOOL:
        return bool(cursor.number("B"))
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise cursor.broken(f"has a type of value that the format does not know ({kind})")
    inner = cursor.number("I")
    if inner in _NUMBERS:
        return cursor.numbers(np.dtype(_NUMBERS[inner][1]))
    if inner == _BOOL:
        return cursor.numbers(np.dtype(np.uint8)) != 0
    if inner == _STRING:
        return cursor.texts()
    raise cursor.broken(f"is an array of arrays or of an unknown type ({inner}), which is not read")


class GgufTensor(NamedTuple):
    """One tensor's place in a file."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    offset: int  # of its first byte within the file
    nbytes: int


class GgufHeader(NamedTuple):
    """The header of a file."""

    path: Path
    metadata: Metadata
    tensors: tuple[GgufTensor, ...]
    nbytes: int  # of the header itself
    digest: bytes  # of those bytes, for fingerprints: a vocabulary has megabytes
    size: int  # of the file


def read_header(path: Path, most: int | None = None, *, outline: bool = False) -> GgufHeader:
    """Return the header of a file, of at most `most` bytes, or `MAX_HEADER`.

    Raise `CheckpointError` if it is longer, truncated, inconsistent or of another format. An `outline` has no digest,
    and of arrays of strings the numbers alone.

    The last two headers are cached until `forget_headers`, while their files stay as they are: config, tokenizer and
    template come from one.
    """
    try:
        status = os.stat(path)
        most = MAX_HEADER if most is None else most
        return _read(path, most, outline, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error}). Check the file.") from error


def read_headers(paths: Sequence[Path], *, outline: bool = False) -> list[GgufHeader]:
    """Return the headers of a model's parts. Raise `CheckpointError` for two tensors of one name.

    Bounds hold for all of them together, since one small file may have the names of all parts.
    """
    headers, names, bytes_left, keys_left = list[GgufHeader](), set[str](), MAX_HEADER, MAX_KEYS
    for path in paths:
        header = read_header(path, bytes_left, outline=outline)
        bytes_left, keys_left = bytes_left - header.nbytes, keys_left - len(header.metadata)
        again = next((tensor.name for tensor in header.tensors if tensor.name in names), None)
        if again is not None:
            raise CheckpointError(f"{path}: {again} is in another part, too. Download them again.")
        names.update(tensor.name for tensor in header.tensors)
        if len(names) > MAX_TENSORS or keys_left < 0:
            raise CheckpointError(
                f"{path}: with this part there are {len(names):,} tensors and {MAX_KEYS - keys_left:,} keys, and of a "
                f"model at most {MAX_TENSORS:,} and {MAX_KEYS:,} are read. Download the parts again."
            )
        headers.append(header)
    return headers


def forget_headers() -> None:
    """Drop the cached headers: one with a vocabulary of 151,000 tokens has 25 MB."""
    if _read.cache_info().currsize:
        _read.cache_clear()
        give_back()


@functools.lru_cache(maxsize=2)
def _read(path: Path, most: int, outline: bool, version: tuple[int, ...]) -> GgufHeader:
    with open_plain(path) as file:
        cursor = Cursor(path, file, most, outline=outline)
        tensors, keys = _begin(cursor)
        metadata = read_metadata(cursor, keys)
        alignment = metadata.integer("general.alignment", ALIGNMENT)
        if not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CheckpointError(f"{path}: general.alignment={alignment} is not a power of two. Download it again.")
        known = UNREAD | fork_types(path.name, metadata)
        table = [_tensor(cursor, number, known) for number in range(tensors)]
        nbytes, digest = cursor.position, b"" if outline else cursor.digest()
        start = -(-cursor.position // alignment) * alignment
        placed = tuple(tensor._replace(offset=start + tensor.offset) for tensor in table)
        _check(cursor, placed, start, alignment)
        return GgufHeader(path, metadata, placed, nbytes, digest, cursor.size)


def _begin(cursor: Cursor) -> tuple[int, int]:
    """Check the first bytes; return the numbers of tensors and of keys."""
    if cursor.size < 24:
        raise cursor.broken(f"needs 24 bytes, and the file has {cursor.size:,}")
    magic = bytes(cursor.number("B") for _ in range(4))
    if magic != MAGIC:
        if magic == b"vers":
            raise CheckpointError(f"{cursor.path} is a Git LFS pointer, not the weights. Run: git lfs pull")
        older = magic in _OLDER
        raise CheckpointError(
            f"{cursor.path} is {'of a format before GGUF' if older else 'no GGUF file'} (it begins with {magic!r}). "
            f"{'Convert it with llama.cpp' if older else 'Check the file, or download it again'}."
        )
    version = cursor.number("I")
    if version not in VERSIONS:
        big = version in {number << 24 for number in VERSIONS}
        problem = "is big-endian, which is not read" if big else f"has version {version} of GGUF; 2 and 3 are read"
        raise CheckpointError(f"{cursor.path} {problem}. Convert it with llama.cpp's scripts.")
    tensors = cursor.count(24, "tensors", MAX_TENSORS)
    keys = cursor.count(13, "keys", MAX_KEYS)
    return tensors, keys


def fork_types(file_name: str, metadata: Metadata) -> dict[int, str]:
    """Return the types that a file has from a fork of llama.cpp, by its own keys or names.

    Forks give the same numbers to types of their own, so that a number alone says nothing.
    """
    value = metadata.get("general.name")
    name = f"{file_name} {value if isinstance(value, str) else ''}"[:MAX_NAME].casefold()
    is_prism = any(key.startswith("prism.") for key in metadata) or any(one in name for one in PRISM_NAMES)
    return PRISM_TYPES if is_prism else {}


def _tensor(cursor: Cursor, number: int, known_types: Mapping[int, str]) -> GgufTensor:
    """Read one entry of the table; its offset is still counted from the beginning of the tensors.

    `known_types` are the names of types that are not read.
    """
    cursor.reading = f"the name of tensor {number + 1:,}"
    name = cursor.text(MAX_NAME)
    cursor.reading = name
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.broken(f"has {dimensions} dimensions, where 1 to {_MAX_DIMENSIONS} are possible")
    *stored, kind_number, offset = cursor.fields(_PLACES[dimensions])
    shape = tuple(reversed(stored))
    kind = TYPES.get(kind_number)
    if kind is None:
        known = known_types.get(kind_number)
        raise CheckpointError(
            f"{cursor.path}: {name} is stored as {known or f'type {kind_number}'}, which is "
            f"{'not read' if known else 'unknown'}. Read are {', '.join(sorted(kind.name for kind in TYPES.values()))}."
        )
    blocks, rest = divmod(shape[-1], kind.values)
    if min(shape) < 1 or rest:
        raise cursor.broken(f"its shape {_shown(shape)} is not made of blocks of {kind.values} values ({kind.name})")
    return GgufTensor(name, kind, shape, offset, math.prod(shape[:-1]) * blocks * kind.layout.itemsize)


def _check(cursor: Cursor, tensors: tuple[GgufTensor, ...], start: int, alignment: int) -> None:
    """Raise `CheckpointError` if tensors lie outside of the file, or on each other, or share a name."""
    names = set[str]()
    for tensor in tensors:
        cursor.reading = tensor.name
        if tensor.name in names:
            raise cursor.broken("is there twice")
        names.add(tensor.name)
        if (tensor.offset - start) % alignment:
            raise cursor.broken(f"begins at {tensor.offset - start}, not at a multiple of {alignment}")
        if tensor.offset + tensor.nbytes > cursor.size:
            raise cursor.broken(
                f"{tensor.kind.name} {_shown(tensor.shape)} ends at byte {tensor.offset + tensor.nbytes:,}, and the "
                f"file has {cursor.size:,}"
            )
    for before, after in itertools.pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if before.offset + before.nbytes > after.offset:
            cursor.reading = after.name
            raise cursor.broken(f"overlaps {before.name}")


def _shown(shape: tuple[int, ...]) -> str:
    return str([*shape])[:80]


class StopTokens(TypedDict):
    """The tokens of config.json that begin and end a sequence."""

    bos_token_id: int | None
    eos_token_id: list[int] | None


def stop_tokens(metadata: Metadata) -> StopTokens:
    """Return `bos_token_id` and `eos_token_id`, as config.json has them.

    Files name one end-of-sequence token. Chat models end a turn with another one, which only newer files name, so
    llama.cpp also takes control tokens by their texts; the same texts are taken here.
    """
    bos = metadata.integer("tokenizer.ggml.bos_token_id", None)
    named = [metadata.integer(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    ends = [index for index in named if index is not None]
    texts, kinds = metadata.texts("tokenizer.ggml.tokens", None), metadata.numbers("tokenizer.ggml.token_type", None)
    if texts is not None and kinds is not None:
        control = (kinds[: len(texts)] == CONTROL).nonzero()[0]  # Gemma has 6,000 that are unused
        ends += texts.equal_to(ENDS, control)
        harmony = texts.equal_to(HARMONY_ENDS, control)
        if len(harmony) == len(HARMONY_ENDS):
            within = texts.equal_to(frozenset(("<|end|>",)), control)
            ends = [*(index for index in ends if index not in within), *harmony]
    return {"bos_token_id": bos, "eos_token_id": list(dict.fromkeys(ends)) or None}
