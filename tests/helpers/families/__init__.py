"""The cases of each family that tests compare with transformers, with what a GGUF file can hold of them.

A module is named by its model_type, and has

    CASES     configs by name; what each case is there for stands in its name
    EMBEDS    configs by name of models that embed only, which generate nothing to compare (see `helpers.embedders`)
    HELD      cases that a GGUF file can hold, some with the one option changed that it can't
    REFUSED   cases that no GGUF file can hold, and what the error says of them
    IMPLIED   keys of sizes that other keys imply; every other size has to be in the file

The prompts of the parity tests have 24 tokens, 64 more are generated.
"""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "head_dim": 12}


def case(model_type: str, architecture: str, **options: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **SIZES, **options}
