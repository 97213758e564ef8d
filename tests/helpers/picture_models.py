"""Small random models that read pictures, as folders: made by transformers, with a tokenizer of bytes."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from helpers import checkpoints
from helpers.towers import random_tensors
from rekindle._src.images import Picture, processor_of_files
from rekindle._src.models.loading.stored import text_config
from rekindle._src.models.vision.registry import vision_config
from rekindle._src.text.tokenizer_limits import byte_of_character

FIRST = 256  # the id of the first special token
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "bos_token_id": None,
    "eos_token_id": FIRST + 2, "pad_token_id": FIRST,
}  # fmt: skip
HALF = [0.5, 0.5, 0.5]


@dataclasses.dataclass(frozen=True)
class PictureModel:
    """A small model of a family."""

    kind: str  # what the names of transformers' classes begin with
    config: Mapping[str, Any]
    special: Sequence[str]  # tokens of pictures
    place: str  # a picture in a chat template
    token: str  # in whose place rows stand
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    module: str = ""  # of the image processor; none where that is on torchvision alone: then its inputs are made here
    inputs: Callable[[Any, Any], dict[str, Any]] = lambda outputs, places: {}  # of the image processor's outputs

    generating: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # options of transformers' `generate`

    def id_of(self, token: str) -> int:
        return FIRST + (*ENDS, *self.special).index(token)


def _qwen(outputs: Any, places: Any) -> dict[str, Any]:
    return {
        "pixel_values": outputs["pixel_values"], "image_grid_thw": outputs["image_grid_thw"],
        "mm_token_type_ids": places.int(),
    }  # fmt: skip


def _gemma3(outputs: Any, places: Any) -> dict[str, Any]:
    return {"pixel_values": outputs["pixel_values"], "token_type_ids": places.int()}


def _gemma4(outputs: Any, places: Any) -> dict[str, Any]:
    return {
        "pixel_values": outputs["pixel_values"], "image_position_ids": outputs["image_position_ids"],
        "mm_token_type_ids": places.int(),
    }  # fmt: skip


def _views(outputs: Any) -> tuple[Any, list[Any], Any]:
    """The patches of each view in rows of one length, [V, P, D], their counts along both sides, and which are there."""
    import torch

    grids = [(view.rows, view.columns) for plan in outputs for view in plan.plan.views]
    parts = torch.split(torch.cat([torch.from_numpy(one.floats()) for one in outputs]), [a * b for a, b in grids])
    padded = torch.nn.utils.rnn.pad_sequence([*parts], batch_first=True)
    there = torch.arange(padded.shape[1]) < torch.tensor([[len(part)] for part in parts])
    return padded, grids, there


def _gemma4_unified(outputs: Any, places: Any) -> dict[str, Any]:
    import torch

    patches, grids, there = _views(outputs)
    index = torch.arange(patches.shape[1])
    xy = torch.stack([torch.stack([index % columns, index // columns], -1) for _, columns in grids])
    xy = torch.where(there[..., None], xy, -1)
    return {"pixel_values": patches, "image_position_ids": xy, "mm_token_type_ids": places.int()}


def _lfm2(outputs: Any, places: Any) -> dict[str, Any]:
    import torch

    patches, grids, there = _views(outputs)
    return {
        "pixel_values": patches, "spatial_shapes": torch.tensor(grids), "pixel_attention_mask": there.long(),
    }  # fmt: skip


def _smolvlm(outputs: Any, places: Any) -> dict[str, Any]:
    return {"pixel_values": outputs["pixel_values"], "pixel_attention_mask": outputs["pixel_attention_mask"]}


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
QWEN_VISION: dict[str, Any] = {
    "depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16, "out_hidden_size": 64,
    "num_position_embeddings": 64,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
PART = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": FIRST + 5, "vision_start_token_id": FIRST + 3, "vision_end_token_id": FIRST + 4,
    "video_token_id": 319, "tie_word_embeddings": False,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "special": QWEN_TOKENS,
    "place": "<|vision_start|><|image_pad|><|vision_end|>",
    "token": "<|image_pad|>",
    "preprocessor": {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64}, "image_mean": HALF, "image_std": HALF,
    },
    "module": "qwen2_vl",
    "inputs": _qwen,
}  # fmt: skip
SIGLIP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14,
    "image_size": 56,
}  # fmt: skip
WINDOWS = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 16, "position_embedding_size": 1024,
    "pooling_kernel_size": 3,
}  # fmt: skip
GEMMA4_TEXT = {
    **TEXT, **WINDOWS, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
}  # fmt: skip
GEMMA4_IDS = {  # those of films and sounds are never generated: in transformers they would stand for padding
    "boi_token_id": FIRST + 3, "eoi_token_id": FIRST + 4, "image_token_id": FIRST + 5, "video_token_id": 1318,
    "audio_token_id": 1317, "boa_token_id": 1316, "eoa_token_index": 1315,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "special": ("<|image>", "<image|>", "<|image|>"),
    "place": "<|image|>",
    "token": "<|image|>",
    "preprocessor": {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": 16, "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
    },
    "module": "gemma4",
    "inputs": _gemma4,
}  # fmt: skip
TILES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
CASES: dict[str, PictureModel] = {
    "qwen3-vl": PictureModel(
        "Qwen3VL",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0, 2]},
            **QWEN_IDS,
        },
        **QWEN,
    ),
    "qwen3.5": PictureModel(
        "Qwen3_5",
        {"text_config": {**TEXT, **LINEAR, "rope_parameters": PART}, "vision_config": QWEN_VISION, **QWEN_IDS},
        **QWEN,
    ),
    "gemma3": PictureModel(
        "Gemma3",
        {
            "text_config": {**TEXT, **WINDOWS, "query_pre_attn_scalar": 16},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4, "boi_token_index": FIRST + 3, "eoi_token_index": FIRST + 4,
            "image_token_index": FIRST + 5, "image_token_id": FIRST + 5,
        },
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "<start_of_image>",
        "<image_soft_token>",
        {
            "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, "image_mean": HALF,
            "image_std": HALF, "image_seq_length": 4,
        },
        module="gemma3",
        inputs=_gemma3,
    ),
    "gemma4": PictureModel(
        "Gemma4", {"text_config": GEMMA4_TEXT, "vision_config": GEMMA4_VISION, **GEMMA4_IDS}, **GEMMA4
    ),
    "gemma4-both-ways": PictureModel(
        "Gemma4",
        {
            "text_config": {**GEMMA4_TEXT, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
            "vision_config": GEMMA4_VISION,
            **GEMMA4_IDS,
        },
        **GEMMA4,
    ),
    "smolvlm": PictureModel(
        "SmolVLM",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SIGLIP, "patch_size": 16, "image_size": 64},
            "scale_factor": 2, "image_token_id": FIRST + 5,
        },
        ("<fake_token_around_image>", "<global-img>", "<image>"),
        "<image>",
        "<image>",
        {
            "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 128},
            "max_image_size": {"longest_edge": 64}, "do_image_splitting": True, "image_mean": HALF, "image_std": HALF,
        },
        {"image_seq_len": 4},
        module="smolvlm",
        inputs=_smolvlm,
    ),
    "gemma4-unified": PictureModel(
        "Gemma4Unified",
        {
            "text_config": {**TEXT, **WINDOWS, "global_head_dim": 16},
            "vision_config": {
                "patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 48, "mm_posemb_size": 80,
                "output_proj_dims": 48,
            },
            **GEMMA4_IDS,
        },
        **GEMMA4
        | {
            "preprocessor": GEMMA4["preprocessor"] | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
            "module": "",
            "inputs": _gemma4_unified,
            # In transformers 5.24 `forward` makes the masks of Gemma 3. Those of Gemma 4, in which a picture's tokens
            # see each other in layers with a window and within it, come with this cache alone.
            "generating": {"cache_implementation": "static"},
        },
    ),
    "lfm2-vl": PictureModel(
        "Lfm2Vl",
        {
            "text_config": {
                **TEXT, "model_type": "lfm2", "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            },
            "vision_config": {
                "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16, "num_patches": 64,
                "vision_use_head": False,
            },
            "projector_hidden_size": 40, "image_token_id": FIRST + 5,
        },
        ("<|image_start|>", "<|image_end|>", "<image>", "<|img_thumbnail|>", *TILES),
        "<image>",
        "<image>",
        {
            "image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 16, "downsample_factor": 2,
            "tile_size": 64, "min_tiles": 2, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 16,
            "max_pixels_tolerance": 1.0, "image_mean": HALF, "image_std": HALF,
        },
        inputs=_lfm2,
    ),
}  # fmt: skip


def write_texts(folder: Path, case: PictureModel) -> None:
    """Write the tokenizer, the chat template and the processor's numbers."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_of_character(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = (*ENDS, *case.special)
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    assert backend.token_to_id(special[0]) == FIRST
    backend.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("PLACE", case.place)
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "preprocessor_config.json").write_text(json.dumps(case.preprocessor))
    if case.processor:
        (folder / "processor_config.json").write_text(json.dumps(case.processor))


def made(name: str, folder: Path, seed: int = 0) -> Any:
    """Write a model's folder, and return transformers' model of it."""
    import torch
    import transformers

    case = CASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{case.kind}Config")(**case.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.kind}ForConditionalGeneration")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():  # what is initialised to 0 or 1 would say nothing
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    write_texts(folder, case)
    model.generation_config.eos_token_id = None
    return model


def picture(seed: int, width: int, height: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def inputs_of(name: str, token_ids: list[int], pictures: list[Any]) -> dict[str, Any]:
    """Return the inputs of transformers' model for a prompt that already has its pictures' places, and no other's."""
    import torch
    from PIL import Image

    case = CASES[name]
    ids, inputs = torch.tensor([token_ids]), {}
    if pictures and not case.module:
        processor = processor_of_files(case.preprocessor, case.processor, case.config)
        inputs = case.inputs(
            [processor.patches(Picture.of(one.copy())) for one in pictures], ids == case.id_of(case.token)
        )
    elif pictures:
        module = importlib.import_module(f"transformers.models.{case.module}.image_processing_pil_{case.module}")
        kind = str(case.preprocessor["image_processor_type"])
        options = {key: value for key, value in case.preprocessor.items() if key != "image_processor_type"}
        images: Any = [Image.fromarray(one) for one in pictures]
        outputs = getattr(module, f"{kind}Pil")(**options)(
            [images], return_tensors="pt", input_data_format="channels_last"
        )
        inputs = case.inputs(outputs, ids == case.id_of(case.token))
    return {"input_ids": ids, **inputs}


def greedy(name: str, model: Any, token_ids: list[int], pictures: list[Any], count: int) -> list[int]:
    """Return transformers' text for such a prompt."""
    import torch

    case, inputs = CASES[name], inputs_of(name, token_ids, pictures)
    options = {"do_sample": False, "max_new_tokens": count, "suppress_tokens": [case.id_of(case.token)]}
    with torch.no_grad():
        out = model.generate(**inputs, **options, **case.generating)
    generated: list[int] = out[0, len(token_ids) :].tolist()
    return generated


MODEL_TYPES = {"qwen3-vl": "qwen3_vl", "qwen3.5": "qwen3_5", "gemma3": "gemma3"}
TEXT_TYPES = {"qwen3-vl": "qwen3_vl_text", "qwen3.5": "qwen3_5_text", "gemma3": "gemma3_text"}


def written(name: str, folder: Path, seed: int = 0, case: PictureModel | None = None) -> Path:
    """A model's folder with random weights, made without transformers. `case` is another model of this family."""
    case = case or CASES[name]
    raw = {"model_type": MODEL_TYPES[name], **case.config}
    text = {"model_type": TEXT_TYPES[name], "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **raw["text_config"]}
    raw["text_config"] = text
    vision = vision_config(raw)
    assert vision is not None
    state = {
        f"model.language_{name}" if name.startswith("model.") else name: tensor
        for name, tensor in checkpoints.tensors(text_config(raw), seed).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state | random_tensors(vision, seed), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    write_texts(folder, case)
    return folder
