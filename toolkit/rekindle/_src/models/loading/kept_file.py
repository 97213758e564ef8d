"""The file of kept weights, brought into memory: mapped, read from disk, and its checksums computed.

It needs no JAX, so a thread can do this while another one imports JAX: nearly all of it leaves the GIL.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.atomic_checkpoint import ITEM
from rekindle._src.models.loading import checksums, file_lease, kept_place, mmap_weights, tensor_files
from rekindle._src.models.loading.file_lease import FileLease
from rekindle._src.models.loading.tensor_files import Header
from rekindle_kernels import private_files


class Mapped:
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


class Brought(NamedTuple):
    """A file that is wholly in memory, and the checksums of its tensors, by name."""

    mapped: Mapped
    sums: dict[str, str]


def map_it(header: Header) -> Mapped | None:
    """Map a file; return None where that fails, or where others could change it meanwhile."""
    try:
        lease = file_lease.take(header.file)
    except OSError:
        return None
    try:
        return Mapped(header, mmap_weights.view(header.file), lease)
    except BaseException as error:
        if lease is not None:
            lease.release()
        if not isinstance(error, OSError):
            raise
        return None


def find(kept: Path, most: int) -> Mapped | None:
    """Return the kept weights, mapped; None where they have to be read or are more than `most` bytes.

    Errors of reading them are passed on.
    """
    if private_files.distrust_reason(kept.parent) is not None or not kept.is_dir():
        return None
    path = kept / ITEM / kept_place.FILE
    private_files.check(path, inside=kept.parent)
    header = tensor_files.read_header(path)
    return map_it(header) if header.size <= most else None


def bring(mapped: Mapped) -> Brought:
    """Bring all of a mapped file into memory, in two calls that leave the GIL; errors of reading are passed on."""
    mmap_weights.bring(mapped.content)
    return Brought(mapped, checksums.of_file(mapped.header.entries, mapped.content))
