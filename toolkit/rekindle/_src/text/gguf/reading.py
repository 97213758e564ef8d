"""The tokenizer, chat template and defaults of sampling that a GGUF file has in its metadata."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from rekindle._src.models.loading.gguf.header import GgufHeader, read_header
from rekindle._src.models.loading.gguf.metadata import Metadata
from rekindle._src.models.loading.gguf.stop_tokens import stop_tokens
from rekindle._src.text.gguf.kept import key_of, load_or_make
from rekindle._src.text.gguf.partial import PartialTokenizer
from rekindle._src.text.gguf.vocabulary import Vocabulary, read_backend, recipe

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip


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
        return PartialTokenizer(bpe, whole)
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
