"""The jobs of a guard that encodes: it has a tokenizer. A guard reads this file by itself: see `core/guarded.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def prepare(settings: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the job: it encodes a text, and answers with its ids or with the reason why it has none."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_buffer(settings["tokenizer"].encode())

    def encode(job: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ids": backend.encode(job["text"], add_special_tokens=job["special"]).ids}
        except BaseException as error:  # a panic of the library is one
            return {"failed": f"the tokenizers library failed: {str(error)[:200]}"}

    return encode
