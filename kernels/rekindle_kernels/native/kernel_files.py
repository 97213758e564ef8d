"""The folder that keeps machine code of kernels from one process to the next, as far as only this user can write it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from rekindle_kernels import private_files

cache_folder: Path | None = None  # `rekindle_kernels.configure` sets it


def folder() -> Path:
    """Return where machine code is kept."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (cache_folder or user / "rekindle_kernels") / "native"


def is_trusted() -> bool:
    """True if the folder is this user's own; if it is not, this is said once, and code is made at each start."""
    reason = private_files.distrust_reason(folder())
    if reason is not None:
        private_files.tell_once(reason)
    return reason is None


def read(kernel: str, digest: str) -> bytes | None:
    """Return the object code of a kernel that is kept with this digest; None if there is none, or it is damaged."""
    with contextlib.suppress(OSError):
        if is_trusted():
            place = _object_file(kernel, digest)
            content = private_files.read(place, inside=folder())
            checksum, code = content[:16], content[16:]
            if bytes.fromhex(private_files.checksum(place.name, code)) == checksum:
                private_files.touch(place)
                return code
    return None


def write(kernel: str, digest: str, code: bytes) -> None:
    """Keep object code, complete or not at all; where it can't be written, each start has to make it."""
    with contextlib.suppress(OSError):
        if is_trusted():
            private_files.make_folder(folder())
            place = _object_file(kernel, digest)
            private_files.write(place, [bytes.fromhex(private_files.checksum(place.name, code)), code])


def _object_file(kernel: str, digest: str) -> Path:
    return folder() / f"{kernel}-{private_files.stored_name(digest)}.o"


def shared_library(name: str, digest: str) -> Path | None:
    """Return the file of a shared library that is kept under a name; None if its content has another digest."""
    with contextlib.suppress(OSError):
        if _is_private() and digest_of(private_files.read(folder() / name, inside=folder())) == digest:
            private_files.touch(folder() / name)
            return folder() / name
    return None


def keep_shared_library(name: str, content: bytes) -> Path | None:
    """Keep a shared library, complete or not at all, and return its file; None where it can't be kept."""
    with contextlib.suppress(OSError):
        if _is_private():
            private_files.make_folder(folder())
            private_files.write(folder() / name, [content])
            return folder() / name
    return None


def digest_of(content: bytes) -> str:
    """Return the digest of a library that its manifest names."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _is_private() -> bool:
    """True if no other user can replace a file in the folder after it was checked and before it is loaded."""
    return is_trusted() and not private_files.is_shared(folder())
