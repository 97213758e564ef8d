"""What names a checkpoint's weights everywhere something is kept: page digests, programs, laid-out weights, snapshots.

Small folders (up to 16 MiB of weights) are hashed in full. A larger one would take seconds, so it is named by
its config, its safetensors headers (names, dtypes, shapes), and per file the size and

- in a hub cache, the blob's name, which is the content's own SHA-256: exact, and the same on every machine;
- elsewhere the modification time and sampled blocks, 64 in all. Every way of writing new weights changes the time.
  A copy that does not keep times gets a new name, which costs one reload; the opposite mistake, old pages matched
  with new weights, would cost wrong tokens. The samples catch tools that restore the time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle._src.models.loading.tensor_files import Header

SMALL = 16 << 20
_SAMPLES, _BLOCK = 64, 4096  # cold reads of a disk: the budget of 100 ms holds for any number of files
_VOLATILE = ("_name_or_path", "transformers_version")  # of config.json: say nothing about the model


def folder_fingerprint(config: Mapping[str, Any], headers: Sequence[Header]) -> str:
    """Of a parsed config.json and the headers of the weight files."""
    digest = hashlib.blake2b(digest_size=16)
    meaning = {key: value for key, value in config.items() if key not in _VOLATILE}
    _add(digest, "config", json.dumps(meaning, sort_keys=True))
    small = sum(header.size for header in headers) <= SMALL
    for header in headers:
        _add(digest, header.file.name, header.size, header.raw)
        for piece in _content(header, small, max(1, _SAMPLES // len(headers))):
            _add(digest, piece)
    return digest.hexdigest()


def with_precision(fingerprint: str, dtype: str, quantize: str | None, quantize_embeddings: bool) -> str:
    """The same checkpoint in another precision computes other keys and values, so it needs another name."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, fingerprint, dtype, quantize, quantize_embeddings if quantize else None)
    return digest.hexdigest()


def files_digest(paths: Iterable[Path]) -> str:
    """Of the names and the content of source files."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in paths:
        content = path.read_bytes()
        hasher.update(f"{path.parent.name}/{path.name}:{len(content)}:".encode())
        hasher.update(content)
    return hasher.hexdigest()


def _content(header: Header, small: bool, samples: int) -> Iterable[bytes | int | str]:
    if small:
        yield header.file.read_bytes()
        return
    real = header.file.resolve()
    if header.file.is_symlink() and real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", real.name):
        yield real.name
        return
    yield real.stat().st_mtime_ns
    with real.open("rb") as file:
        for i in range(samples):
            file.seek(max(0, header.size - _BLOCK) * (i + 1) // samples)
            yield file.read(_BLOCK)


def _add(digest: Any, *parts: object) -> None:
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
