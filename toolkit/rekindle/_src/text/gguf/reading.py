"""The tokenizer, chat template and defaults of sampling that a GGUF file has in its metadata.

Tokenizers of large vocabularies are stored as tokenizer.json in the cache folder. Making one of 151,000 tokens from a
file's own keys takes twice as long as reading it from tokenizer.json, and one of SentencePiece's, whose merges follow
from scores, several times as long. What a tokenizer of parts knows of all tokens is stored there, too: of Gemma's it
takes 0.1 s to find out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from rekindle._src.core.config import cache_folder
from rekindle._src.core.store import Store
from rekindle._src.models.loading.fingerprint import files_digest
from rekindle._src.models.loading.gguf.header import GgufHeader, Metadata, Texts, read_header, stop_tokens
from rekindle._src.text.gguf.partial import PartialTokenizer
from rekindle._src.text.gguf.token_table import TokenTable
from rekindle._src.text.gguf.vocabulary import Vocabulary, read_backend, recipe
from rekindle._src.text.tokenizer_limits import panics_as
from rekindle.errors import CheckpointError

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip

SMALL = 1 << 20  # bytes; below this size of a header a tokenizer is built too fast to be worth storing


class FileTokenizer(NamedTuple):
    """The parts of a `Tokenizer`."""

    backend: tokenizers.Tokenizer | PartialTokenizer | None
    special: dict[str, str]
    eos_ids: tuple[int, ...]
    bos_id: int | None


def metadata_of(path: str | Path) -> Metadata:
    """Return the metadata of a file."""
    return read_header(Path(path)).metadata


def read_tokenizer(path: str | Path) -> FileTokenizer:
    """Return the tokenizer of a file; one without a vocabulary knows only the ids that end a sequence."""
    header = read_header(Path(path))
    metadata = header.metadata
    stops = stop_tokens(metadata)
    backend = _backend(header)
    special = {} if backend is None else special_tokens(metadata)
    return FileTokenizer(backend, special, tuple(stops["eos_token_id"] or ()), stops["bos_token_id"])


def _backend(header: GgufHeader) -> tokenizers.Tokenizer | PartialTokenizer | None:
    """Return the tokenizer that encodes: parts of a vocabulary where these can stand for it."""
    metadata, key = header.metadata, key_of(header)
    if (bpe := recipe(metadata)) is None:
        return load_or_make(key, lambda: read_backend(metadata))

    def whole() -> tokenizers.Tokenizer:  # keeps no reference to the header, which has megabytes
        tokenizer = load_or_make(key, bpe.whole)
        assert tokenizer is not None, "a recipe makes one"
        return tokenizer

    with contextlib.suppress(ValueError):
        return PartialTokenizer(bpe, whole, functools.partial(_table, key))
    return whole()


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Return the named special tokens, such as `{"bos_token": "<s>"}`; chat templates read them."""
    return Vocabulary.of(metadata).special() if "tokenizer.ggml.tokens" in metadata else {}


def read_templates(path: str | Path) -> tuple[Mapping[str, str], dict[str, str]]:
    """Return the chat templates by name, and the special tokens that they may write."""
    metadata = metadata_of(path)
    templates = {}
    for key in metadata:
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            templates[key[len(_TEMPLATE) + 1 :] or "default"] = metadata.text(key)
    return templates, special_tokens(metadata) if templates else {}


def read_sampling(path: str | Path) -> dict[str, Any]:
    """Return the defaults of sampling as generation_config.json has them; empty where the file has none."""
    metadata = metadata_of(path)
    defaults = {option: metadata.get(f"general.sampling.{key}") for option, key in _SAMPLING.items()}
    defaults = {name: value for name, value in defaults.items() if isinstance(value, (int, float))}
    return {"do_sample": defaults.get("temperature") != 0, **defaults} if defaults else {}


def key_of(header: GgufHeader) -> bytes | None:
    """Return the key under which the tokenizer of a file with this header is stored, or None if not worth storing."""
    return None if header.nbytes < SMALL else header.digest


def load_or_make(key: bytes | None, make: Callable[[], tokenizers.Tokenizer | None]) -> tokenizers.Tokenizer | None:
    """Return the tokenizer stored under this key, or else the result of `make`, which is then stored."""
    if key is None:
        return make()
    stored, name = _place(key)
    with contextlib.suppress(Exception):  # damaged, or of another version of tokenizers: it is built again
        content = stored.get(name)
        if content is not None:
            with panics_as(CheckpointError, f"it read {stored.path(name)}"):
                return tokenizers.Tokenizer.from_buffer(content)
    tokenizer = make()
    if tokenizer is not None:
        with contextlib.suppress(OSError):
            stored.put(name, tokenizer.to_str().encode())
    return tokenizer


def _table(key: bytes | None, texts: Texts) -> TokenTable:
    """Return the table of a vocabulary, stored or stored now under this key."""
    if key is None:
        return TokenTable(texts)
    stored, name = _place(key, "table")
    with contextlib.suppress(OSError, ValueError):  # damaged: it is made again
        content = stored.get(name)
        if content is not None:
            return TokenTable(texts, content)
    table = TokenTable(texts)
    with contextlib.suppress(OSError):
        stored.put(name, table.content())
    return table


def _place(key: bytes, kind: str = "") -> tuple[Store, str]:
    """Return the store, and the name of what it has under a key."""
    digest = hashlib.blake2b(key + _sources() + kind.encode(), digest_size=16)
    return Store(cache_folder() / "tokenizers"), digest.hexdigest()


@functools.cache
def _sources() -> bytes:
    """Return the version of the library and the digest of these modules, which decide how tokenizers are built."""
    return f"{tokenizers.__version__} {files_digest(sorted(Path(__file__).parent.glob('*.py')))}".encode()
