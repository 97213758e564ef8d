"""Tokenizers of large GGUF vocabularies, stored as tokenizer.json in the cache folder.

Making one of 151,000 tokens from a file's own keys takes twice as long as reading it from tokenizer.json, and one of
SentencePiece's, whose merges follow from scores, several times as long.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import tokenizers

from rekindle._src.core.config import cache_folder
from rekindle._src.models.loading.fingerprint import files_digest
from rekindle._src.models.loading.gguf.header import GgufHeader
from rekindle._src.text.panics import panics_as
from rekindle.errors import CheckpointError
from rekindle_kernels import private_files

SMALL = 1 << 20  # bytes; below this size of a header a tokenizer is built too fast to be worth storing


def key_of(header: GgufHeader) -> bytes | None:
    """Return the key under which the tokenizer of a file with this header is stored, or None if not worth storing."""
    return None if header.nbytes < SMALL else header.digest


def load_or_make(key: bytes | None, make: Callable[[], tokenizers.Tokenizer | None]) -> tokenizers.Tokenizer | None:
    """Return the tokenizer stored under this key, or else the result of `make`, which is then stored."""
    if key is None:
        return make()
    path = cache_folder() / "tokenizers" / hashlib.blake2b(key + _sources(), digest_size=16).hexdigest()
    usable = private_files.distrust_reason(path.parent) is None
    if usable:
        with contextlib.suppress(Exception):  # absent, damaged, or of another version of tokenizers: it is built again
            content = private_files.read(path, inside=path.parent)
            with panics_as(CheckpointError, f"it read {path}"):
                return tokenizers.Tokenizer.from_buffer(content)
    tokenizer = make()
    if tokenizer is not None and usable:
        with contextlib.suppress(OSError):
            private_files.make_folder(path.parent)
            private_files.write(path, [tokenizer.to_str().encode()])
    return tokenizer


@functools.cache
def _sources() -> bytes:
    """Return the version of the library and the digest of these modules, which decide how tokenizers are built."""
    return f"{tokenizers.__version__} {files_digest(sorted(Path(__file__).parent.glob('*.py')))}".encode()
