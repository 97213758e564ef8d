"""The header of a GGUF file: its metadata, and where each tensor lies. Nothing of the weights is read.

    "GGUF", version, numbers of tensors and of keys · keys and values · names, shapes, types and offsets · the tensors

All numbers are little-endian; shapes are stored with the fastest axis first, and here, as in numpy, with the slowest.
Metadata has typed values by key, and errors that name the key.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.core.memory import give_back
from rekindle._src.core.plain_files import open_plain
from rekindle._src.models.loading.gguf.blocks import TYPES, UNREAD, BlockType
from rekindle._src.models.loading.gguf.cursor import Cursor, Texts
from rekindle.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # they are read alike; version 1 had counts of 32 bits
ALIGNMENT = 32  # unless general.alignment says otherwise
MAX_NAME = 1 << 10  # bytes; llama.cpp's own limit is 64
_MAX_DIMENSIONS = 4
_OLDER = (b"lmgg", b"tjgg", b"algg", b"fmgg")  # the formats before GGUF, as their bytes lie in the file
Value = int | float | bool | str | Texts | np.ndarray[Any, Any]
MAX_KEY = 1 << 16  # bytes; the format's own limit
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

    def integer(self, key: str, default: Any = _MISSING) -> Any:
        """Return a whole number, or `default` if the key is absent. Raise `CheckpointError` if there is no default."""
        return self._of(key, "a whole number", default, lambda value: type(value) is int)

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """Return a number, as a float."""
        value = self._of(key, "a number", default, lambda value: type(value) in (int, float))
        return float(value) if isinstance(value, int) else value

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        """Return True or False."""
        return self._of(key, "true or false", default, lambda value: type(value) is bool)

    def text(self, key: str, default: Any = _MISSING) -> Any:
        """Return a string."""
        return self._of(key, "a string", default, lambda value: isinstance(value, str))

    def texts(self, key: str, default: Any = _MISSING) -> Any:
        """Return an array of strings."""
        return self._of(key, "an array of strings", default, lambda value: isinstance(value, Texts))

    def numbers(self, key: str, default: Any = _MISSING) -> Any:
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


def read_header(path: Path) -> GgufHeader:
    """Return the header of a file. Raise `CheckpointError` if it is truncated, inconsistent or of another format.

    The last two headers are cached until `forget_headers`, while their files stay as they are: config, tokenizer and
    template come from one.
    """
    try:
        status = os.stat(path)
        return _read(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error}). Check the file.") from error


def forget_headers() -> None:
    """Drop the cached headers: one with a vocabulary of 151,000 tokens has 25 MB."""
    if _read.cache_info().currsize:
        _read.cache_clear()
        give_back()


@functools.lru_cache(maxsize=2)
def _read(path: Path, version: tuple[int, ...]) -> GgufHeader:
    with open_plain(path) as file:
        cursor = Cursor(path, file)
        tensors, keys = _begin(cursor)
        metadata = read_metadata(cursor, keys)
        alignment = metadata.integer("general.alignment", ALIGNMENT)
        if not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CheckpointError(f"{path}: general.alignment={alignment} is not a power of two. Download it again.")
        table = [_tensor(cursor, number) for number in range(tensors)]
        nbytes, digest = cursor.position, cursor.digest()
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
    tensors = cursor.count(24, "tensors")
    keys = cursor.count(13, "keys")
    return tensors, keys


def _tensor(cursor: Cursor, number: int) -> GgufTensor:
    """Read one entry of the table; its offset is still counted from the beginning of the tensors."""
    cursor.reading = f"the name of tensor {number + 1:,}"
    name = cursor.text(MAX_NAME)
    cursor.reading = name
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.broken(f"has {dimensions} dimensions, where 1 to {_MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    kind_number = cursor.number("I")
    kind = TYPES.get(kind_number)
    if kind is None:
        known = UNREAD.get(kind_number)
        raise CheckpointError(
            f"{cursor.path}: {name} is stored as {known or f'type {kind_number}'}, which is "
            f"{'not read' if known else 'unknown'}. Read are {', '.join(sorted(kind.name for kind in TYPES.values()))}."
        )
    blocks, rest = divmod(shape[-1], kind.values)
    if min(shape) < 1 or rest:
        raise cursor.broken(f"its shape {_shown(shape)} is not made of blocks of {kind.values} values ({kind.name})")
    return GgufTensor(name, kind, shape, cursor.number("Q"), math.prod(shape[:-1]) * blocks * kind.layout.itemsize)


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


def stop_tokens(metadata: Metadata) -> dict[str, Any]:
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
