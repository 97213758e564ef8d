"""Small random models that read pictures, as folders: made by transformers, with a tokenizer of bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rekindle._src.text.tokenizer_limits import byte_of_character

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
FIRST = 256  # the id of the first of these
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "bos_token_id": None,
    "eos_token_id": FIRST + 2, "pad_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16, "out_hidden_size": 64,
    "num_position_embeddings": 64,
}  # fmt: skip


def id_of(token: str) -> int:
    return FIRST + SPECIAL.index(token)


PLACES = {
    "image_token_id": id_of("<|image_pad|>"), "vision_start_token_id": id_of("<|vision_start|>"),
    "vision_end_token_id": id_of("<|vision_end|>"), "video_token_id": 319, "tie_word_embeddings": False,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
PART = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**VISION, "deepstack_visual_indexes": [0, 2]},
            **PLACES,
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {"text_config": {**TEXT, **LINEAR, "rope_parameters": PART}, "vision_config": VISION, **PLACES},
    ),
}
PREPROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64}, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def write_texts(folder: Path) -> None:
    """Write the tokenizer, the chat template and the processor's numbers."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_of_character(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    assert backend.token_to_id(SPECIAL[0]) == FIRST
    backend.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def made(name: str, folder: Path, seed: int = 0) -> Any:
    """Write a model's folder, and return transformers' model of it."""
    import torch
    import transformers

    kind, options = CASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():  # what is initialised to 0 or 1 would say nothing
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    write_texts(folder)
    return model


def picture(seed: int, width: int, height: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def greedy(model: Any, token_ids: list[int], pictures: list[Any], count: int) -> list[int]:
    """What transformers generates for a prompt whose pictures have their places already."""
    import torch
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    options = {key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"}
    model.generation_config.eos_token_id = None
    inputs: dict[str, Any] = {}
    ids = torch.tensor([token_ids])
    if pictures:
        read = Qwen2VLImageProcessorPil(**options)([Image.fromarray(one) for one in pictures], return_tensors="pt")
        inputs = {"pixel_values": read["pixel_values"], "image_grid_thw": read["image_grid_thw"]}
        inputs["mm_token_type_ids"] = (ids == id_of("<|image_pad|>")).int()
    with torch.no_grad():
        out = model.generate(input_ids=ids, **inputs, do_sample=False, max_new_tokens=count)
    generated: list[int] = out[0, len(token_ids) :].tolist()
    return generated
