"""The place where laid-out weights are kept. It needs no JAX, so it is known before JAX is imported."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import math
from collections.abc import Iterator
from pathlib import Path

from rekindle._src.core import memory
from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading.stored import Stored
from rekindle._src.models.loading.tensor_files import TensorEntry

MIN_BYTES = 64 << 20  # smaller checkpoints are read again faster than Orbax is imported (0.3 s)
FOLDER = "weights"  # in a cache folder
FILE = "weights.safetensors"  # in a kept checkpoint
_VERSION = "3"


def keeps_groups(seen: Stored, dtype: str, quantize: str | None) -> bool:
    """True if matrices that are stored in groups stay as they are."""
    return quantize is None and dtype == "auto" and seen.may_be_quantized


def has_room(seen: Stored, dtype: str, device_memory: int | None = None) -> bool:
    """True if a checkpoint's weights would fit into memory as floats, beside pages of `device_memory` bytes."""
    itemsize = 4 if dtype == "float32" else 2
    return memory.fits(itemsize * sum(map(_numbers, _entries(seen))), beside=device_memory or 0)


def _entries(seen: Stored) -> Iterator[tuple[TensorEntry, bool]]:
    return ((entry, seen.is_gguf) for header in seen.headers for entry in header.entries)


def _numbers(stored: tuple[TensorEntry, bool]) -> int:
    """Return how many numbers a tensor holds; integers of other formats than GGUF may have two of them in a byte."""
    entry, is_gguf = stored
    packed = not is_gguf and entry.dtype.startswith(("I", "U"))
    return 2 * entry.nbytes if packed else math.prod(entry.shape)


def options(
    seen: Stored,
    dtype: str,
    quantize: str | None,
    quantize_embeddings: bool,
    divided: bool,
    *,
    resolved: str,
    unpacked: bool,
) -> tuple[object, ...]:
    """Return the options of a session that kept weights depend on.

    `dtype` may be "auto"; `resolved` is the dtype that it stands for. With `unpacked`, quantised weights are held as
    floats, because there are no kernels for them.
    """
    keeps = keeps_groups(seen, dtype, quantize)
    as_stored = ("as stored", *["divided"] * divided) if keeps else ()
    as_floats = ("unpacked",) if unpacked and (keeps or quantize is not None) else ()
    return resolved, quantize, quantize_embeddings, *as_stored, *as_floats


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

    `digest` is that of the sources. With another `folder` it is the place of something else that depends on the same.
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
