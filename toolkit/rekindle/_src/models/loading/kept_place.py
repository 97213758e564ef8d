"""Where the laid-out weights of a checkpoint are kept. It needs no JAX, so it can be known before JAX is imported."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading.stored import Stored

MIN_BYTES = 64 << 20  # smaller checkpoints are read again faster than Orbax is imported (0.3 s)
FOLDER = "weights"  # in a cache folder
FILE = "weights.safetensors"  # in a kept checkpoint
_VERSION = "3"


def keeps_groups(seen: Stored, dtype: str, quantize: str | None) -> bool:
    """Whether matrices that are stored in groups stay as they are."""
    return quantize is None and dtype == "auto" and seen.may_be_quantized


def options(
    seen: Stored, dtype: str, quantize: str | None, quantize_embeddings: bool, divided: bool, *, resolved: str
) -> tuple[object, ...]:
    """What of a session's options kept weights depend on. `dtype` may be "auto"; `resolved` is what that stands for."""
    as_stored = ("as stored", *["divided"] * divided) if keeps_groups(seen, dtype, quantize) else ()
    return resolved, quantize, quantize_embeddings, *as_stored


def place(
    cache_dir: str | Path,
    fingerprint: str,
    *asked: object,
    platform: str,
    native: bool,
    digest: str,
    folder: str = FOLDER,
) -> Path:
    """The folder for a checkpoint that is `asked` for in one way, on a platform, with native kernels or without.

    `digest` is that of the sources. In another `folder` it is something else that depends on the same.
    """
    parts = (_VERSION, fingerprint, asked, (platform, native, _flax()), digest)
    key = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    return Path(cache_dir).expanduser() / folder / key


@functools.cache
def sources() -> str:
    """A digest of the sources that lay weights out."""
    return fingerprints.files_digest(sorted(Path(__file__).parents[1].rglob("*.py")))


@functools.cache
def _flax() -> str:
    return importlib.metadata.version("flax")
