"""The file of kept weights: its place, and its content in memory, mapped, read from disk, and its checksums computed.

It needs no JAX, so a thread can do this while another one imports JAX: nearly all of it leaves the GIL.

Checksums detect flipped bits, zeroed and exchanged blocks at the speed of memory; they are no protection against
intent. A tensor's checksum is a weighted sum of its 64-bit words: every block of 256 KiB has a weight of its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import memory
from rekindle._src.core.atomic_checkpoint import ITEM
from rekindle._src.core.dtypes import DTypeLike, checked_dtype, checked_quantize
from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading import mmap_weights, tensor_files
from rekindle._src.models.loading.mmap_weights import FileLease
from rekindle._src.models.loading.stored import StoredCheckpoint
from rekindle._src.models.loading.tensor_files import Header, TensorEntry
from rekindle_kernels import private_files

MIN_BYTES = 64 << 20  # smaller checkpoints are read again faster than Orbax is imported (0.3 s)
FOLDER = "weights"  # in a cache folder
FILE = "weights.safetensors"  # in a kept checkpoint
_VERSION = "3"
SUMMED = 8 << 20  # bytes that are read and summed at a time: whole blocks
_BLOCK = 1 << 15  # words


class WeightForm(NamedTuple):
    """The form that a checkpoint's weights are loaded in. Its options are checked; see `of`."""

    dtype: str = "auto"
    quantize: str | None = None
    quantize_embeddings: bool = True
    divided: bool = False  # over devices, so that matrices in groups have to divide after every group

    @classmethod
    def of(cls, dtype: DTypeLike = "auto", quantize: str | Mapping[str, str | None] | None = None) -> WeightForm:
        """Check a caller's options. Raise `ConfigError`."""
        return cls(checked_dtype("dtype", dtype), checked_quantize(quantize))

    def keeps_groups(self, stored: StoredCheckpoint) -> bool:
        """True if matrices that are stored in groups stay as they are."""
        return self.quantize is None and self.dtype == "auto" and stored.may_be_quantized

    def slot_options(self, stored: StoredCheckpoint, *, resolved: str, unpacked: bool) -> tuple[object, ...]:
        """Return the options that kept weights depend on, with the dtype that "auto" is resolved to.

        With `unpacked`, quantised weights are held as floats, because there are no kernels for them.
        """
        keeps = self.keeps_groups(stored)
        as_stored = ("as stored", *["divided"] * self.divided) if keeps else ()
        as_floats = ("unpacked",) if unpacked and (keeps or self.quantize is not None) else ()
        pictures = ("pictures",) if stored.is_gguf and stored.others is not None else ()
        return resolved, self.quantize, self.quantize_embeddings, *as_stored, *as_floats, *pictures


AS_STORED = WeightForm()


def has_room(stored: StoredCheckpoint, dtype: str, device_memory: int | None = None) -> bool:
    """True if a checkpoint's weights would fit into memory as floats, in addition to pages of `device_memory` bytes."""
    itemsize, numbers = 4 if dtype == "float32" else 2, 0
    for entry in (entry for header in stored.headers for entry in header.entries):
        # Integers of other formats than GGUF may have two numbers in a byte.
        packed = not stored.is_gguf and entry.dtype.startswith(("I", "U"))
        numbers += 2 * entry.nbytes if packed else math.prod(entry.shape)
    return memory.fits(itemsize * numbers, beside=device_memory or 0)


def place(
    cache_dir: str | Path,
    fingerprint: str,
    *asked: object,
    platform: str,
    native: bool,
    digest: str,
    folder: str = FOLDER,
) -> Path:
    """Return the folder for a checkpoint with the options `asked`, on a platform, with native kernels or without.

    `digest` is the sources' digest. Another `folder` is for other data that depends on the same.
    """
    parts = (_VERSION, fingerprint, asked, (platform, native, _flax()), digest)
    key = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    return Path(cache_dir).expanduser() / folder / key


@functools.cache
def sources() -> str:
    """Return a digest of the sources that lay weights out."""
    return fingerprints.files_digest(sorted(Path(__file__).parents[1].rglob("*.py")))


@functools.cache
def _flax() -> str:
    return importlib.metadata.version("flax")


class MappedFile:
    """A mapped file. While its content is needed there, a lease keeps others from changing it."""

    def __init__(self, header: Header, content: NDArray[np.uint8], lease: FileLease | None) -> None:
        self.header, self.content, self._lease = header, content, lease

    def watch(self) -> None:
        """Have a thread move the content to huge pages in a while, and let others change the file then."""
        with contextlib.suppress(RuntimeError):  # no thread to be had
            if mmap_weights.move_later(self.content, self._lease) is not None:
                self._lease = None

    def release(self) -> None:
        """Let others change the file, unless a thread watches for that; may be called again."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


class MappedWeights(NamedTuple):
    """A file that is wholly in memory, and the checksums of its tensors, by name."""

    mapped: MappedFile
    sums: dict[str, str]


def map_it(header: Header) -> MappedFile | None:
    """Map a file; return None where that fails, or where others could change it meanwhile."""
    try:
        lease = mmap_weights.take_lease(header.file)
    except OSError:
        return None
    try:
        return MappedFile(header, mmap_weights.view(header.file), lease)
    except BaseException as error:
        if lease is not None:
            lease.release()
        if not isinstance(error, OSError):
            raise
        return None


def find(kept: Path, most: int) -> MappedFile | None:
    """Return the kept weights, mapped; None where they have to be read or are more than `most` bytes.

    Errors of reading them are passed on.
    """
    if private_files.distrust_reason(kept.parent) is not None or not kept.is_dir():
        return None
    path = kept / ITEM / FILE
    private_files.check(path, inside=kept.parent)
    header = tensor_files.read_header(path)
    return map_it(header) if header.size <= most else None


def bring(mapped: MappedFile) -> MappedWeights:
    """Bring all of a mapped file into memory, in two calls that leave the GIL; errors of reading are passed on."""
    mmap_weights.bring(mapped.content)
    return MappedWeights(mapped, checksums_of(mapped.header.entries, mapped.content))


def checksum_of(array: NDArray[Any]) -> str:
    """Return the checksum of an array that lies in one piece."""
    return checksum_of_pieces(array.nbytes, [array.reshape(-1).view(np.uint8)])


def checksum_of_pieces(size: int, pieces: Iterable[NDArray[np.uint8]]) -> str:
    """Return the checksum of `size` bytes in pieces; all of them but the last one are whole numbers of blocks."""
    total, index, tail = np.uint64(size), 0, 0
    with np.errstate(over="ignore"):
        for flat in pieces:
            words = flat[: flat.size // 8 * 8].view(np.uint64)
            for start in range(0, words.size, _BLOCK):
                block = words[start : start + _BLOCK]
                total += np.add.reduce(block) * np.uint64(2 * index + 1)
                index += 1
            tail = int.from_bytes(flat[words.nbytes :].tobytes(), "little")
    return f"{int(total):016x}{tail:x}"


def checksums_of(entries: Sequence[TensorEntry], content: NDArray[np.uint8]) -> dict[str, str]:
    """Return the checksums of all tensors in a file's `content`, by name.

    One call of numpy's adds up all that lies on whole words, and leaves the GIL meanwhile. A call for each block would
    wait for the GIL a thousand times while another thread imports JAX.
    """
    result = dict[str, str]()
    joined = _joined(entries)
    if joined:
        blocks = [range(entry.offset // 8, (entry.offset + entry.nbytes) // 8, _BLOCK) for entry in joined]
        firsts = np.cumsum([0, *map(len, blocks)])[:-1]
        weights = np.concatenate([np.arange(1, 2 * len(starts), 2) for starts in blocks]).astype(np.uint64)
        words = content[: joined[-1].offset + joined[-1].nbytes].view(np.uint64)
        sums = np.add.reduceat(words, np.concatenate(blocks)) * weights
        totals = np.add.reduceat(sums, firsts) + np.array([entry.nbytes for entry in joined], np.uint64)
        result = {entry.name: f"{int(total):016x}0" for entry, total in zip(joined, totals, strict=True)}
    others = (entry for entry in entries if entry.name not in result)
    return result | {entry.name: checksum_of(content[entry.offset : entry.offset + entry.nbytes]) for entry in others}


def _joined(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return the tensors that lie side by side from the first one on, in whole words of the file."""
    adjacent = list[TensorEntry]()
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset % 8 or entry.nbytes % 8 or not entry.nbytes:
            continue
        if adjacent and entry.offset != adjacent[-1].offset + adjacent[-1].nbytes:
            break
        adjacent.append(entry)
    return adjacent
