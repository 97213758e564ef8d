"""A Llama or Qwen 3 checkpoint as a GGUF file, the way llama.cpp's own converter lays it out, without a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from engine import hf_config
from gguf.quants import quantize
from numpy.typing import NDArray

KINDS = {
    16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    8: (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    4: (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}


def write(folder: str, file: Path, *, bits: int) -> None:
    config = hf_config(folder)
    kind = ARCHITECTURES[config["model_type"]]
    matrices, file_type = KINDS[bits]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, tensor in tensors(folder):
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, tensor.shape[0] // head_dim)
        ours = names.get_name(name, try_suffixes=(".weight",))
        wanted = matrices if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(ours, quantize(tensor, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(tensor: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rotary pairs side by side, as llama.cpp's Llama rotates them; Hugging Face keeps them half a head apart."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def tensors(folder: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The bfloat16 tensors of model.safetensors in float32, read without a library that knows bfloat16."""
    with (Path(folder) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            assert entry["dtype"] == "BF16", name
            start, stop = entry["data_offsets"]
            file.seek(begin + start)
            words = np.frombuffer(file.read(stop - start), np.uint16)
            yield name, (words.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
