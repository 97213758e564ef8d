"""The ids that begin and end a sequence, by a GGUF file's metadata.

Files name one end-of-sequence token. Chat models end a turn with another one, which only newer files name, so llama.cpp
also takes control tokens by their texts; the same texts are taken here.
"""

from __future__ import annotations

from typing import Any

from rekindle._src.models.loading.gguf.metadata import Metadata

CONTROL = 3  # in tokenizer.ggml.token_type
ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
     "<EOT>", "_<EOT>", "<|end_of_turn|>")
)  # fmt: skip


def stop_tokens(metadata: Metadata) -> dict[str, Any]:
    """Return `bos_token_id` and `eos_token_id`, as config.json has them."""
    bos = metadata.integer("tokenizer.ggml.bos_token_id", None)
    named = [metadata.integer(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    ends = [index for index in named if index is not None]
    texts, kinds = metadata.texts("tokenizer.ggml.tokens", None), metadata.numbers("tokenizer.ggml.token_type", None)
    if texts is not None and kinds is not None:
        ends += texts.equal_to(ENDS, (kinds[: len(texts)] == CONTROL).nonzero()[0])  # Gemma has 6,000 that are unused
    return {"bos_token_id": bos, "eos_token_id": list(dict.fromkeys(ends)) or None}
