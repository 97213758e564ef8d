"""Tokenizers of large GGUF vocabularies, kept as tokenizer.json in the cache folder.

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

SMALL = 1 << 20  # bytes of a header, up to which a tokenizer is made faster than it is worth keeping


def key_of(header: GgufHeader) -> bytes | None:
    """Return the key under which the tokenizer of a file with this header is kept; None if it is not worth keeping."""
    return None if header.nbytes < SMALL else header.digest


def kept(key: bytes | None, make: Callable[[], tokenizers.Tokenizer | None]) -> tokenizers.Tokenizer | None:
    """Return the tokenizer that was kept under this key, or what `make` returns, which is kept then."""
    if key is None:
        return make()
    path = cache_folder() / "tokenizers" / hashlib.blake2b(key + _sources(), digest_size=16).hexdigest()
    usable = private_files.distrust_reason(path.parent) is None
    if usable:
        with contextlib.suppress(Exception):  # absent, damaged, or of another version of tokenizers: it is made again
            content = private_files.read(path, inside=path.parent)
            with panics_as(CheckpointError, f"it read {path}"):
                return tokenizers.Tokenizer.from_buffer(content)
    made = make()
    if made is not None and usable:
        with contextlib.suppress(OSError):
            private_files.make_folder(path.parent)
            private_files.write(path, [made.to_str().encode()])
    return made


@functools.cache
def _sources() -> bytes:
    """What the tokenizers are made by: the version of the library, and these modules."""
    return f"{tokenizers.__version__} {files_digest(sorted(Path(__file__).parent.glob('*.py')))}".encode()
