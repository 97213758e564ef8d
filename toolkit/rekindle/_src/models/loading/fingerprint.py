"""The name of a checkpoint's weights in every cache: page digests, programs, laid-out weights, snapshots.

Small folders (up to 16 MiB of weights) are hashed in full. A larger one would take seconds, so it is named by
its config, its safetensors headers (names, dtypes, shapes), and per file the size and

- in the hub's own cache, the blob's name, which is the content's own SHA-256: exact, and the same on every machine;
- for a link to a file that is merely named like such a blob, the content's SHA-256, computed once and remembered. The
  name alone would let one checkpoint pass for another;
- elsewhere the modification time and sampled blocks, 64 in all. Every way of writing new weights changes the time.
  A copy that does not keep times gets a new name, which costs one reload; the opposite mistake, old pages matched
  with new weights, would cost wrong tokens. The samples catch tools that restore the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle._src.core.config import cache_folder
from rekindle._src.core.store import Store
from rekindle._src.models.loading.tensor_files import Header

_log = logging.getLogger(__name__)
SMALL = 16 << 20
_SAMPLES, _BLOCK = 64, 4096  # in all files together: cold reads of a disk have to fit into 100 ms
_VOLATILE = ("_name_or_path", "transformers_version")  # keys of config.json that say nothing about the model


def folder_fingerprint(config: Mapping[str, object], headers: Sequence[Header]) -> str:
    """Return the name of the model that a parsed config.json and the headers of its weight files describe."""
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
    """Return the checkpoint's name in this precision: each precision computes other keys and values."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, fingerprint, dtype, quantize, quantize_embeddings if quantize else None)
    return digest.hexdigest()


def files_digest(paths: Iterable[Path]) -> str:
    """Return a digest of the names and the content of source files."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb", buffering=0) as file:  # 300 of them, at each start
            content = file.read()
        hasher.update(f"{path.parent.name}/{path.name}:{len(content)}:".encode())
        hasher.update(content)
    return hasher.hexdigest()


def _content(header: Header, small: bool, samples: int) -> Iterable[bytes | int | str]:
    if small:
        yield header.file.read_bytes()
        return
    real = header.file.resolve()
    if header.file.is_symlink() and real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", real.name):
        yield real.name if real.is_relative_to(hub_cache()) else content_sha256(real)
        return
    yield real.stat().st_mtime_ns
    with real.open("rb") as file:
        for i in range(samples):
            file.seek(max(0, header.size - _BLOCK) * (i + 1) // samples)
            yield file.read(_BLOCK)


def hub_cache() -> Path:
    """Return the folder of huggingface_hub's downloads, by the variables that it reads."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(folder)).expanduser().resolve()


def content_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content. It is remembered in the cache folder until the file changes."""
    status = file.stat()
    key = repr((str(file), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    remembered = Store(cache_folder() / "fingerprints", verified=True)
    with contextlib.suppress(OSError, ValueError):
        text = (remembered.get(name) or b"").decode()
        if re.fullmatch(r"[0-9a-f]{64}", text):
            return text
    _log.info("hashing %s, %d MB; this is remembered", file, status.st_size >> 20)
    with file.open("rb") as stream:
        text = hashlib.file_digest(stream, "sha256").hexdigest()
    with contextlib.suppress(OSError):
        remembered.put(name, text.encode())
    return text


def _add(digest: Any, *parts: object) -> None:
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
