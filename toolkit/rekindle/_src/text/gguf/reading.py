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
from rekindle._src.text.gguf.kept import kept, key_of
from rekindle._src.text.gguf.partial import PartialTokenizer
from rekindle._src.text.gguf.vocabulary import Vocabulary, read_backend, recipe

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip


class FileTokenizer(NamedTuple):
    """What a `Tokenizer` is made of."""

    backend: tokenizers.Tokenizer | PartialTokenizer | None
    special: dict[str, str]
    eos_ids: tuple[int, ...]
    bos_id: int | None


def metadata_of(path: str | Path) -> Metadata:
    """The metadata of a file."""
    return read_header(Path(path)).metadata


def read_tokenizer(path: str | Path) -> FileTokenizer:
    """The tokenizer of a file; one without a vocabulary only knows the ids that end a sequence."""
    header = read_header(Path(path))
    metadata = header.metadata
    stops = stop_tokens(metadata)
    backend = _backend(header)
    special = {} if backend is None else special_tokens(metadata)
    return FileTokenizer(backend, special, tuple(stops["eos_token_id"] or ()), stops["bos_token_id"])


def _backend(header: GgufHeader) -> tokenizers.Tokenizer | PartialTokenizer | None:
    """What is encoded with: parts of a vocabulary where these can stand for it."""
    metadata, key = header.metadata, key_of(header)
    if (bpe := recipe(metadata)) is None:
        return kept(key, lambda: read_backend(metadata))

    def whole() -> tokenizers.Tokenizer:  # without the header, which has megabytes
        made = kept(key, bpe.whole)
        assert made is not None, "a recipe makes one"
        return made

    with contextlib.suppress(ValueError):
        return PartialTokenizer(bpe, whole)
    return whole()


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """The named special tokens, such as `{"bos_token": "<s>"}`; chat templates read them."""
    return Vocabulary.of(metadata).special() if "tokenizer.ggml.tokens" in metadata else {}


def read_templates(path: str | Path) -> tuple[Mapping[str, str], dict[str, str]]:
    """The chat templates by name, and the special tokens that they may write."""
    metadata = metadata_of(path)
    found = {}
    for key in metadata:
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            found[key[len(_TEMPLATE) + 1 :] or "default"] = metadata.text(key)
    return found, special_tokens(metadata) if found else {}


def read_sampling(path: str | Path) -> dict[str, Any]:
    """The defaults of sampling as generation_config.json has them; empty where the file has none."""
    metadata = metadata_of(path)
    found = {ours: metadata.get(f"general.sampling.{theirs}") for ours, theirs in _SAMPLING.items()}
    found = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    return {"do_sample": found.get("temperature") != 0, **found} if found else {}
